"""Pages that a KV connector of vLLM's loads, from another server on the loopback address or from
main memory: they are read from codes alone.

`make vllm` installs vLLM and NIXL in an environment of their own; without it these tests are
skipped.
"""

import socket
import subprocess

import pytest
import torch
from support.codec import on_gpu
from support.places import ROOT
from support.vllm import NEEDS_VLLM, PYTHON, TOKENS, drive, engine_job, hold
from support.vllm_answers import assert_same, differences, read_in_transformers, read_loaded
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.model.source import DEMO
from rotationzoo.recipe.loading import PRESETS

pytestmark = NEEDS_VLLM
FIND_NIXL = [PYTHON, "-c", "import nixl._api"]
HAS_NIXL = PYTHON.exists() and subprocess.run(FIND_NIXL, capture_output=True).returncode == 0
LENGTH, BLOCK = 700, 64
FEW = {"block_size": BLOCK, "max_model_len": 768, "num_gpu_blocks_override": 1 + 768 // BLOCK}
"""Blocks for one request, and one more that vLLM takes for itself: another request takes them."""


@pytest.fixture(scope="module")
def prompts() -> tuple[list[int], list[int]]:
    """One, and another."""
    text = (ROOT / "rotationzoo/cache/layer.py").read_text()
    ids = AutoTokenizer.from_pretrained(DEMO)(text).input_ids
    return ids[:LENGTH], ids[LENGTH : 2 * LENGTH]


def assert_loaded(made, answer: dict, held: int, device="cpu") -> None:
    """That the `held` first tokens were read from codes alone, where others are read exact."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).to(device)
    expected = read_loaded(made, model, answer["ids"], held)[-TOKENS:]
    exact = read_in_transformers(made, model, answer["ids"])[-TOKENS:]
    assert differences(exact, expected).mean() > 0.01
    assert_same(answer["answer"], expected)


def nixl(role: str, **options: str) -> dict:
    return {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role, **options}}


def variables() -> dict[str, str]:
    """Of a server on this machine. Two of them share its cores."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed beside vLLM")
def test_a_server_on_the_loopback_address_hands_its_pages_over(made, prompts, tmp_path):
    """The other server has few blocks, and the windows of another request had exact copies in
    those that it loads into: measured without forgetting them, .53. Of another artifact, it loads
    nothing, and reads the prompt itself."""
    folders = first, second, third = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    prompt, another = prompts
    asked = [{"do_remote_decode": True, "do_remote_prefill": False}]
    job = engine_job(made, [[prompt]], 1, handed=asked, block_size=BLOCK, **nixl("kv_producer"))
    other = calibrate(Job("demo", PRESETS["hadamard"], tmp_path / "other", device="cpu")).folder
    options = FEW | nixl("kv_consumer", kv_load_failure_policy="recompute")
    with hold(first, job, **variables()) as prefilled:
        handed = prefilled["rounds"][0][0]["handed"]
        job = engine_job(made, [[another], [prompt]], handed=[None, handed], **options)
        answer = drive(second, job, **variables())["rounds"][1][0]
        job = engine_job(other, [[prompt]], handed=[handed], **options)
        refused = drive(third, job, **variables())["rounds"][0][0]
    # The last token of a prompt is always computed.
    assert_loaded(made, answer, LENGTH - 1)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    assert_same(refused["answer"], read_in_transformers(other, model, refused["ids"])[-TOKENS:])


@on_gpu
@pytest.mark.parametrize("simple", ["0", "1"])
def test_pages_come_back_from_main_memory(simple, made, prompts, tmp_path, device):
    """Of vLLM's two connectors for it. The second request takes all blocks of the first."""
    prompt, another = prompts
    rounds = [[prompt], [another], [prompt]]
    job = engine_job(made, rounds, kv_offloading_size=1, **FEW)
    answers = drive(tmp_path, job, VLLM_USE_SIMPLE_KV_OFFLOAD=simple)["rounds"]
    assert_loaded(made, answers[2][0], LENGTH // BLOCK * BLOCK, device)
