"""What a released vLLM is asked for beside an artifact: refused in a sentence, noted or served.

`make vllm` installs vLLM in an environment of its own; without it these tests are skipped.
"""

import json
from pathlib import Path

import pytest
from support.vllm import NEEDS_VLLM, drive, serve

from rotationzoo.model.source import DEMO
from rotationzoo.vllm import WORKER

pytestmark = NEEDS_VLLM
SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0}
EXACT = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
SPREAD = "--hf_overrides.rope_parameters.factor=4 --hf_overrides.rope_parameters.rope_type=linear"
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
    "--load-format=dummy": "with random weights",
    "--kv_cache_dtype fp8": "KV cache dtype",
    '--speculative-config {"method":"ngram","num_speculative_tokens":2}': "speculative decoding",
    "--attention-backend FLASH_ATTN": "another attention backend than CUSTOM",
    "--attention-config.backend=TRITON_ATTN": "another attention backend than CUSTOM",
    "-pp 2": "pipeline parallelism",
    "--prefix-match-unit 64": "prefixes that end inside a block",
    '--weight-transfer-config {"backend":"nccl"}': "weights that change meanwhile",
    "--no-such-option": "vLLM refuses its options: unrecognized arguments: --no-such-option",
    "--max-num-seqs many": "vLLM refuses its options: argument --max-num-seqs: invalid int",
    "--max-model-len 99999": "max_model_len (99999) is greater than",
    "--config missing.yaml": "vLLM refuses its options",
}
NOTED = {
    "--port 8123": "exact, which takes",
    '--hf-overrides {"rms_norm_eps":1e-06}': "exact, which takes",
    "--max-num-seqs 512": "403 MB for 512 requests at a time",
    "--enable-lora": "without the adapters of --enable-lora",
    "--attention-backend CUSTOM": "exact, which takes",
}


def ask(made: Path, *words: str) -> list[str]:
    return ["serve", "demo", "--rotations", str(made), "--dry-run", "--", *words]


@pytest.fixture(scope="module")
def ends(made, tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("commands")
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "scaled").mkdir()
    scaled = {**config, "rope_parameters": SCALED}
    (folder / "scaled/config.json").write_text(json.dumps(scaled))
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


@pytest.fixture
def another(tmp_path):
    """A plugin that vLLM loads after ours, and that runs these lines."""

    def install(*lines: str) -> dict[str, str]:
        about = tmp_path / "zz_other-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: zz-other\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[vllm.general_plugins]\nzz = zz_other:run\n")
        code = ["from vllm.platforms import current_platform"]
        code += ["from vllm.v1.attention.backends.registry import *", "def run():"]
        code += [f"    {line}" for line in lines]
        (tmp_path / "zz_other.py").write_text("\n".join(code))
        return {"ALSO": str(tmp_path)}

    return install


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


def test_vllm_alone_refuses_before_it_starts_anything_and_is_itself_without(made, tmp_path):
    named = {"additional_config": {"rotationzoo": {"artifact": str(made)}}}
    scaled = {"hf_overrides": {"rope_parameters": SCALED}}
    asked = [
        {},
        scaled | {"load_format": "dummy"},
        named,
        named | scaled,
        named | {"load_format": "dummy"},
        {"additional_config": {"rotation_zoo": {}}, "worker_cls": WORKER},
        {"additional_config": {"rotationzoo": {"artefact": str(made)}}},
    ]
    plain, other, ours, *refused = drive(
        tmp_path, {"configs": [{"model": str(DEMO)} | options for options in asked]}
    )
    assert plain["worker"] == other["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert ours["worker"] == WORKER
    assert {each["backend"] for each in (plain, ours)} == {EXACT}, "the worker puts ours there"
    said = ("rope_parameters", "random weights", "no artifact is named", "artifact: Field required")
    for config, words in zip(refused, said, strict=True):
        assert words in config["worker"]
        assert config["worker"].startswith(("RotationZooError", "UnsupportedModel"))
