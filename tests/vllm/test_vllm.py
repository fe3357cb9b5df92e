"""A released vLLM that serves the demo model from our pages, against `RotatedCache`."""

import copy
import random
import re
import subprocess
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.codec import on_gpu
from support.jobs import calibrate_short
from support.recipes import CODED, QUICK
from support.vllm import (
    CHUNK,
    NEEDS_VLLM,
    ON_GPU,
    PYTHON,
    TEXT,
    TOKENS,
    drive,
    engine_job,
    environment,
    serve,
    serve_in_turn,
)
from support.vllm_answers import (
    CLOSE,
    assert_answers,
    assert_same,
    cell_of,
    differences,
    read_exact,
    read_in_transformers,
)
from support.vllm_models import SERVED, make_served

from rotationzoo import Artifact
from rotationzoo.checks.server import Server
from rotationzoo.codec.formats import FORMATS
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.evaluation.probes import record_probes
from rotationzoo.model.source import DEMO, find
from rotationzoo.recall.prompts import PromptSettings, join_answers, read_answers, write_prompts
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.simulation.simulated import Simulation

pytestmark = NEEDS_VLLM
RECIPES = {"oscar": QUICK, "coded": CODED}


@pytest.fixture(scope="module")
def prompts(ids) -> list[list[int]]:
    """Token ids of different lengths: shorter than the windows, and of several chunks."""
    return [ids[:100], ids[50:450], ids[:1100]]


@pytest.fixture(scope="module")
def alone(made, prompts, tmp_path_factory) -> dict:
    """Each prompt as a separate request, without prefix caching."""
    folder = tmp_path_factory.mktemp("alone")
    options = {"prompts_too": True, "enable_prefix_caching": False}
    return serve(folder, made, [[ids] for ids in prompts], **options)


def test_every_log_probability_is_that_of_the_cache_in_transformers(made, demo, alone):
    for (answer,) in alone["rounds"]:
        expected = read_in_transformers(made, demo, answer["ids"])
        assert_same([*answer["prompt"], *answer["answer"]], expected)


@on_gpu
def test_a_gpu_answers_in_float16_as_the_cache_in_transformers(
    made, demo, prompts, tmp_path, device
):
    """With FlashAttention, captured steps, and prefixes in the second round. Measured: 0.0021 and
    0.0024 with vLLM's own cache, which is rounding, and 0.0097 and 0.0054 with ours, where some
    codes flip. Rows that are read exact instead of from codes would make 0.045."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    engine = {"dtype": "float16", "enforce_eager": False, "compilation_config": graphs}
    model = copy.deepcopy(demo).to(device, torch.float16)
    measured = {}
    for name, artifact in (("plain", None), ("ours", made)):
        (tmp_path / name).mkdir()
        rounds = serve(tmp_path / name, artifact, [prompts, prompts], **engine)["rounds"]
        assert max(answer["cached"] for answer in rounds[1]) > 900
        far = []
        for answer in (answer for answers in rounds for answer in answers):
            ids = answer["ids"]
            expected = read_exact(model, ids)
            if artifact is not None:
                expected = read_in_transformers(made, model, ids, cut=answer["cached"])
            far.append(differences(answer["answer"], expected[-TOKENS:]))
        measured[name] = torch.cat(far).mean().item()
    print(measured)
    assert measured["ours"] < 8 * measured["plain"]


@pytest.mark.parametrize("artifact", ["made", "coded"])
def test_two_processes_hold_a_head_each_and_samples_of_a_prompt_are_read_apart(
    artifact, demo, prompts, tmp_path, monkeypatch, request
):
    made = request.getfixturevalue(artifact)
    made = getattr(made, "folder", made)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    together = {
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 2048,  # both samples of a prompt in one step
        "enable_prefix_caching": False,
        "sampling": {"n": 2, "temperature": 1.0, "seed": 3},
    }
    served = serve(tmp_path, made, [[prompts[2][:700]]], **together)
    first, second = served["rounds"][0]
    assert first["ids"] != second["ids"]
    assert_answers(made, demo, [first, second], chunk=2048)
    for rank in "01":
        assert f'rotationzoo_layers{{engine="0",rank="{rank}"}} 4.0' in served["metrics"]


@pytest.mark.parametrize("late", [False, True])
def test_requests_of_one_step_read_a_prefix_that_it_stores(late, made, demo, prompts, tmp_path):
    """The first one fills blocks that the others find in the prefix cache, and a second stream
    stores them as early or as late as it may. Then one goes on while two begin."""
    ids = prompts[2]
    several = [ids[:512] + ids[at : at + 60] for at in (600, 700, 800)]
    later = [several[0] + ids[900:930], ids[:512] + ids[950:954]]
    engine = {"max_num_batched_tokens": 2048, "enable_prefix_caching": True}
    job = engine_job(made, [several, later], late=late, **engine)
    (served,) = serve_in_turn(tmp_path, [job])
    answers = [answer for answers in served["rounds"] for answer in answers]
    assert [answer["cached"] for answer in answers] == [0, 512, 512, 512, 512]
    assert_answers(made, demo, answers, chunk=2048)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        *((name, "oscar") for name in SERVED if name != "latents"),
        ("windows and soft caps", "coded"),
    ],
)
def test_other_families(family, recipe, prompts, tmp_path):
    """Beside layers with a window, all others get the same bits of transform coding."""
    model, folder, artifact = make_served(family, tmp_path, RECIPES[recipe])
    options = {"model": str(folder), "prompts_too": True, "enable_prefix_caching": False}
    served = serve(tmp_path, artifact, [[prompts[2]]], **options)
    (answer,) = served["rounds"][0]
    expected = read_in_transformers(artifact, model, answer["ids"])
    found, exact = [*answer["prompt"], *answer["answer"]], read_exact(model, answer["ids"])
    assert differences(expected, exact).mean() > 10 * CLOSE, "attention matters"
    if ON_GPU and "windows" in family:  # vLLM's own layers round products of float32 there
        plain = serve(tmp_path, None, [[answer["ids"]]], **options, tokens=1)["rounds"][0][0]
        rounding = differences(plain["prompt"], exact).mean()
        print(f"measured of vLLM's own cache: {rounding:.1e}")
        # 0.0089 and 0.025 were measured, and 0.0026 and 0.0094 of vLLM itself: codes flip.
        assert differences(found, expected).mean() < 5 * rounding
        return
    assert_same(found, expected)


def test_blocks_go_from_layers_with_a_window_to_others_and_back(ids, tmp_path):
    """A block of layers with full attention holds 1,408 tokens, and one of the others 128. What one
    kind left may be NaN to the other."""
    model, folder, artifact = make_served("windows and soft caps", tmp_path)
    together = [ids[at : at + 500] for at in range(0, 240, 40)]
    rounds = [[ids[:1700]], [ids[:1700]], together, [ids[7:1707]], together]
    engine = {"model": str(folder), "num_gpu_blocks_override": 26, "enable_prefix_caching": True}
    served = serve(tmp_path, artifact, rounds, **engine)
    answers = [answer for answers in served["rounds"] for answer in answers]
    assert [answer["cached"] for answer in answers] == [0, 1408, *[0] * 13]
    assert_answers(artifact, model, answers)


@pytest.mark.skipif(bool(ON_GPU), reason="a GPU's blocks are smaller")
def test_capacity_of_a_model_with_windows(tmp_path):
    """In bfloat16, a token of a KV head takes 128 bytes, and 24 in 2 bits. Six blocks of 128 tokens
    make one that is larger than a block in bfloat16: 2 heads x 768 x 24 bytes, and 2 x 128 x 128.
    A request takes four blocks of layers with a window: 127 tokens, and a chunk of 256."""
    _, folder, artifact = make_served("windows and soft caps", tmp_path)
    engine = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 32768}
    rotated, plain = (serve(tmp_path, each, [], **engine) for each in (artifact, None))
    assert rotated["blocks"] == plain["blocks"] * 32768 // 36864
    for held, of_request in ((rotated, 43 + 4), (plain, 256 + 4)):
        assert held["capacity"] == held["blocks"] * 32768 // of_request
    assert rotated["capacity"] > 4.9 * plain["capacity"]


@contextmanager
def server(artifact: Path | None, folder: Path):
    """The address of a server that `rotationzoo serve` started, or vLLM itself."""
    # Below the ports that systems give to connections: vLLM binds its own many seconds later.
    port = random.randrange(20_000, 32_000)
    words = [PYTHON.parent / "rotationzoo", "serve", "demo", "--rotations", str(artifact)]
    if artifact is None:
        entry = "vllm.entrypoints.launchers.api_server.entry"
        words = [PYTHON, "-m", entry, "--model", str(DEMO)]
    options = {"port": port, "dtype": "float32", "max-model-len": 2048}
    options |= {"max-num-batched-tokens": CHUNK, "max-num-seqs": 8}
    options |= {name.replace("_", "-"): value for name, value in ON_GPU.items()}
    words += [f"--{name}={value}" for name, value in options.items()]
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*words, "--enforce-eager"], env=environment(), stdout=output, stderr=output
        )
    try:
        for _ in range(300):
            if process.poll() is not None:
                break
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(1)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def probes(made, demo, tokenizer):
    return record_probes(demo, tokenizer, Artifact.open(made), find("demo"))


@pytest.mark.parametrize(("recipe", "verdict"), [(None, "exact"), ("hadamard", "other")])
def test_a_server_that_reads_something_else_is_told(made, probes, tmp_path, recipe, verdict):
    """Measured: 0.00 of what rounding changes from the exact model, where nothing is rounded."""
    artifact = None
    if recipe is not None:
        artifact = calibrate_short("demo", tmp_path / "other", PRESETS[recipe]).folder
    with server(artifact, tmp_path) as address:
        reading = Server(address, Artifact.open(made), probes).read()
    assert reading.verdict == verdict, reading
    assert (reading.artifact is None) == (artifact is None)
    if artifact is not None:
        assert reading.artifact == Artifact.open(artifact).identity


def assert_counted(address: str) -> None:
    """That a server reports what it was asked."""
    with urllib.request.urlopen(address.removesuffix("v1") + "metrics") as answer:
        text = answer.read().decode()
    rows = re.findall(r"(?m)^rotationzoo_(\w+)\{.*\} (\S+)$", text)
    metrics = {name: float(number) for name, number in rows}
    assert metrics.pop("start_check_distance") < 0.25
    assert metrics.pop("copies_forgotten_total") > 0
    slots = metrics.pop("copy_slots")
    assert metrics == {
        "artifact_info": 1,
        "bits_per_element": 2.5,
        "layers": 4,
        "copy_slots_used": slots,
        "requests_sink_from_codes": 0,
        "requests_recent_from_codes": 0,
        "key_rows_not_finite_total": 0,
        "value_rows_not_finite_total": 0,
    }


def test_questions_to_a_server_are_answered_as_an_evaluation_says(
    made, demo, probes, tokenizer, tmp_path
):
    settings = PromptSettings("needles", 12, length=1024, pool="judge")
    questions = write_prompts(settings, tokenizer, tokenizer(TEXT * 3).input_ids)
    with server(made, tmp_path) as address:
        job = {"server": address, "prompts": [prompt.ids.tolist() for prompt in questions]}
        ranks = drive(tmp_path, job)
        readings = [Server(address, Artifact.open(made), probes).read() for _ in range(2)]
        assert_counted(address)
    # Measured: 0.24 of what rounding changes, in chunks of 256 where the record has one of 1,024.
    assert [reading.verdict for reading in readings] == ["in use", "in use"], readings
    assert readings[1].artifact == Artifact.open(made).identity
    served = [
        all(rank == 1 for rank in of_prompt[question.answer.start - 1 : question.answer.stop - 1])
        for prompt, of_prompt in zip(questions, ranks, strict=True)
        for question in prompt.questions
    ]
    artifact = Artifact.open(made)
    layout = CacheLayout.of_recipe(artifact.recipe, FORMATS["vllm"])
    layout = replace(layout, prefill_chunk=CHUNK, prefill_layout="window")
    arm = RotatedCodec(artifact.rotations)
    layers = {layer.index for layer in artifact.geometry}
    with Simulation(arm, layout, artifact.geometry, layers).running(demo):
        answers = join_answers([read_answers(demo, [each]) for each in questions])
    simulated = answers.correct.tolist()
    assert 10 < sum(simulated) < len(simulated)
    # Measured: 90 of 96 right, and the same ones. A code that flips may decide a question.
    differ = sum(one != other for one, other in zip(served, simulated, strict=True))
    assert differ <= 2


def test_more_blocks_in_the_same_memory_and_vllm_itself_without_an_artifact(
    alone, demo, prompts, tmp_path
):
    """A token of a KV head takes 2 x (16 + 4) bytes, and 2 x 64 x 4 in float32."""
    plain = serve(tmp_path, None, [[prompts[1]]], prompts_too=True, enable_prefix_caching=False)
    assert alone["tokens"] == pytest.approx(plain["tokens"] * 512 / 40, rel=1e-3)
    (answer,) = plain["rounds"][0]
    found = [*answer["prompt"], *answer["answer"]]
    # Kernels of a GPU round products of float32: 3.7e-3 on average was measured there.
    looser = 10 if ON_GPU else 1
    assert differences(found, read_exact(demo, answer["ids"])).mean() < looser * CLOSE


def test_rows_of_heads_take_different_bytes(coded, alone, demo, prompts, tmp_path):
    """The second request finds a prefix. Pages of all sizes are planned once a step."""
    layers = coded.rotations.values()
    assert len({cell_of(layer) for layer in layers}) > 1
    cells = sum(map(cell_of, layers))
    rounds, inside = [[prompts[1]]] * 2, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    options = {"planned": True, "enable_prefix_caching": True}
    served = serve(tmp_path, coded.folder, rounds, variables=inside, **options)
    assert 0 < served["calls"]["plan"] <= served["calls"]["execute_model"]
    assert served["blocks"] == pytest.approx(alone["blocks"] * 4 * 40 / cells, rel=1e-3)
    answers = [answer for (answer,) in served["rounds"]]
    assert [answer["cached"] > 0 for answer in answers] == [False, True]
    assert_answers(coded.folder, demo, answers)
