"""Quantized checkpoints: what transformers loads, and what is refused before it is fetched. And a
model's layers, as its config alone has them."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from support.jobs import job
from support.models import edit_config, edited_weights, load_saved, save_tiny
from support.quantized import quantize_to_fp8, set_quantization

from rotationzoo.calibration.plan import plan
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model import loading
from rotationzoo.model.placement import place_weights
from rotationzoo.model.quantized import check_loadable
from rotationzoo.model.source import find

WIDE = dict(hidden_size=256, intermediate_size=384, head_dim=64, num_key_value_heads=2)


def load(folder: Path, placement=None):
    source = find(str(folder))
    config = loading.load_config(source)
    check_loadable(config, source.name, "cpu")
    before = json.dumps(config.quantization_config)
    model = loading.load(source, config, "cpu", "auto", placement)
    assert json.dumps(config.quantization_config) == before, "it is the caller's"
    return model


def test_fp8_is_dequantized_block_by_block(tmp_path, monkeypatch):
    """Also with a GPU, because transformers' FP8 kernels are code from a hub."""
    folder = save_tiny(tmp_path / "model", **WIDE)
    exact = quantize_to_fp8(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    source = find(str(folder))
    check_loadable(loading.load_config(source), source.name, "cuda")
    monkeypatch.undo()
    weights = load(folder).state_dict()
    assert len(exact) == 14
    for name, weight in exact.items():
        assert torch.equal(weights[name], weight), name


def test_the_estimate_counts_what_is_loaded(tmp_path):
    folder = save_tiny(tmp_path / "model", **WIDE)
    plain = plan(job(folder, tmp_path, dtype="bfloat16"))
    quantize_to_fp8(folder)
    quantized = plan(job(folder, tmp_path, dtype="bfloat16"))
    assert quantized.weights_bytes < 0.5 * plain.weights_bytes  # the checkpoint was float32
    assert quantized.peak_memory_bytes == plain.peak_memory_bytes


@pytest.mark.parametrize("width", [192, 200])
def test_blocks_that_are_cut_short_are_refused(width, tmp_path):
    folder = save_tiny(tmp_path / "model", **{**WIDE, "intermediate_size": width})
    quantize_to_fp8(folder)
    with pytest.raises(UnsupportedModel, match=r"blocks of \[128, 128\] that are cut short"):
        load(folder)


def test_fp8_on_disk_is_that_in_memory(tmp_path):
    """What is dequantized is written to the scratch folder in its full size, and limits count it
    so."""
    folder = save_tiny(tmp_path / "model", num_hidden_layers=4, **WIDE)
    quantize_to_fp8(folder)
    ids = torch.arange(40)[None]
    with torch.no_grad(), place_weights("auto", "cpu=4MB") as placement:
        spread = load(folder, placement)
        in_memory = [weight.nbytes for weight in spread.parameters() if not weight.is_meta]
        assert 0 < sum(in_memory) < 4e6
        written = [file.stat().st_size for file in Path(placement["offload_folder"]).iterdir()]
        whole = load(folder)
        assert sum(written) + sum(in_memory) > sum(w.nbytes for w in whole.parameters()) - 1e5
        assert torch.equal(spread(ids).logits, whole(ids).logits)


METHODS = {
    "gptq": dict(bits=4, group_size=128),
    "awq": dict(bits=4, group_size=128),
    "bitsandbytes": dict(load_in_4bit=True),
    "compressed-tensors": dict(config_groups={}, format="float-quantized"),
    "torchao": dict(quant_type={"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}),
}
MODULES = {"gptq": "optimum", "awq": "gptqmodel", "compressed-tensors": "compressed_tensors"}


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_package_is_named_before_anything_is_read(method, tiny, tmp_path, inside):
    module = MODULES.get(method, method)
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tiny / "config.json", folder)  # neither weights nor a tokenizer
    set_quantization(folder, quant_method=method, **METHODS[method])
    generate = ["generate", "--rotations", "none", "--prompt", "a text"]
    for words in (["calibrate"], ["evaluate"], generate):
        ended = inside(words[0], str(folder), *words[1:], "--device", "cpu")
        assert ended.returncode == 1
        error, hint = ended.stderr.strip().splitlines()[-2:]
        assert f"cannot be loaded, because it is quantized with {method}: " in error
        assert hint.startswith("Hint: run: pip install '")
        assert module.replace("_", "-") in hint
    refused = json.loads(inside("calibrate", str(folder), "--dry-run", "--json").stdout)["refusal"]
    assert method in refused
    data_free = ["--recipe", "hadamard", "--output", "free", "--device", "cpu"]
    assert inside("calibrate", str(folder), *data_free).returncode == 0, "it reads no weights"


def test_an_unknown_method_is_refused(copied_tiny):
    set_quantization(copied_tiny, quant_method="of-tomorrow")
    with pytest.raises(UnsupportedModel, match="does not know the quantization of-tomorrow"):
        load(copied_tiny)


FP8 = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
PACKED = dict(quant_method="compressed-tensors", format="float-quantized", config_groups={})
UNSCALED = {  # config, the ending of scales, whether one is missing
    "one scale is missing": (FP8, "_scale_inv", True),
    "fp8 with the names of compressed-tensors": (FP8, "_scale", False),
    "compressed-tensors with the names of fp8": (PACKED, "_scale_inv", False),
    "compressed-tensors with one scale missing": (PACKED, "_scale", True),
    "no quantization config": (None, "_scale_inv", False),
}


@pytest.mark.parametrize("case", UNSCALED)
def test_codes_without_their_scale_are_refused_by_name(case, tmp_path):
    folder = save_tiny(tmp_path / "model", **WIDE)
    quantize_to_fp8(folder)
    table, ending, is_missing = UNSCALED[case]
    edit_config(folder, quantization_config=table)
    name = "model.layers.1.self_attn.k_proj.weight"
    with edited_weights(folder) as weights:
        for scale in [each for each in weights if each.endswith("_scale_inv")]:
            weights[scale.removesuffix("_scale_inv") + ending] = weights.pop(scale)
        if is_missing:
            del weights[f"{name}{ending}"]
    (folder / "hf_quant_config.json").write_text(json.dumps(FP8))  # nothing reads it
    with pytest.raises(UnsupportedModel, match=r"_proj\.weight holds codes \(F8_E4M3\)") as caught:
        load_saved(folder, "auto")
    if is_missing:
        assert f"{name} holds" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e5m2])
def test_codes_without_any_quantization_are_refused(dtype, copied_tiny):
    with edited_weights(copied_tiny) as weights:
        weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(32, 32).to(dtype)
    says = r"layers\.0\.mlp\.up_proj\.weight holds codes .* its config names no quantization"
    with pytest.raises(UnsupportedModel, match=says):
        load_saved(copied_tiny)
