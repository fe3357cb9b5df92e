"""Which files of a folder are a model's weights, and which tensors in them a model uses: what is
fingerprinted is what is loaded."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.models import edit_config, edited_weights, load_saved, save_tiny

from rotationzoo.errors import ModelUnavailable
from rotationzoo.model import loading
from rotationzoo.model.files import INDEX
from rotationzoo.model.source import Source, fetch, find, weights_fingerprint

SINGLE, K_BIAS = "model.safetensors", "model.layers.1.self_attn.k_proj.bias"


def load(folder: Path):
    source = find(str(folder))
    loading.on_meta(loading.load_config(source), source.name)
    fetch(source)
    return load_saved(folder)


@pytest.fixture
def sharded(tiny, tmp_path) -> Path:
    """The tiny model in several files."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


def refusal(folder: Path) -> tuple[str, str]:
    with pytest.raises(ModelUnavailable) as caught:
        load(folder)
    assert caught.value.hint
    return str(caught.value), caught.value.hint


@pytest.mark.parametrize("kept", [5000, 60, 4])
def test_a_file_that_was_cut_off_is_named(kept, copied_tiny, sharded):
    """Within its tensors, its header, or the length of the header."""
    for folder, name in ((copied_tiny, SINGLE), (sharded, sorted(sharded.glob("*.saf*"))[1].name)):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:kept])
        error, hint = refusal(folder)
        assert f"{folder / name} is not a safetensors file: " in error
        assert hint == "fetch the weights again"
        (folder / name).write_bytes(whole[:-2])
        error, _ = refusal(folder)
        assert error.endswith(f"{name} is not a safetensors file: it was cut off before its end")


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "su", "factor": 4.0},
        {"rope_type": "ntk_by_parts", "factor": 2, "original_max_position_embeddings": 64},
    ],
)
def test_an_unknown_kind_of_rope_is_refused(scaling, copied_tiny):
    edit_config(copied_tiny, rope_parameters={**scaling, "rope_theta": 1e4})
    kind = scaling.get("type") or scaling["rope_type"]
    error, hint = refusal(copied_tiny)
    assert error == f"transformers does not support RoPE of type '{kind}', which {copied_tiny} has"
    assert "upgrade transformers" in hint


@pytest.mark.parametrize("with_index", [True, False])
def test_two_sets_of_weights_are_refused(with_index, sharded, tmp_path):
    """Also if the second has no index, because a server then loads all files."""
    shutil.copy(save_tiny(tmp_path / "other", seed=1) / SINGLE, sharded)
    if not with_index:
        (sharded / INDEX).unlink()
    error, _ = refusal(sharded)
    assert "two sets of weights: model.safetensors, which transformers loads, and model-0" in error


def test_the_same_weights_in_shards_and_twice_are_loaded(tiny, sharded):
    assert weights_fingerprint(find(str(sharded))) == weights_fingerprint(find(str(tiny)))
    shutil.copy(tiny / SINGLE, sharded)
    assert weights_fingerprint(find(str(sharded))) == weights_fingerprint(find(str(tiny)))
    load(sharded)


def test_a_single_file_is_loaded_beside_a_stale_index(tiny, copied_tiny, sharded, tmp_path):
    folder = copied_tiny
    shutil.copy(sharded / INDEX, folder)
    edit_config(folder, transformers_weights="other.safetensors")  # transformers would load it
    shutil.copy(save_tiny(tmp_path / "other", seed=1) / SINGLE, folder / "other.safetensors")
    expected = load_file(tiny / SINGLE)
    for name, weight in load(folder).state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert weights_fingerprint(find(str(folder))) == weights_fingerprint(find(str(tiny)))


@pytest.mark.parametrize(
    "other", ["adapter_config.json", "shard-00001-model-00001-of-00001.safetensors"]
)
def test_other_files_that_would_be_loaded_are_refused(other, copied_tiny):
    """An adapter, which transformers applies with peft installed, and a distributed checkpoint."""
    (copied_tiny / other).write_text("{}")
    error, hint = refusal(copied_tiny)
    assert f"also holds {other}" in error
    assert "merge_and_unload" in hint


def test_an_absent_shard_is_named(sharded, monkeypatch):
    last = max(sharded.glob("model-*"))
    last.rename(last.with_suffix(".part"))
    error, hint = refusal(sharded)
    assert error.endswith(f"sharded are not complete: they lack {last.name}, which {INDEX} names")
    assert hint.startswith(f"copy {last.name} there")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: None)
    says = f"someone/model are not complete: they lack {last.name}"
    with pytest.raises(ModelUnavailable, match=says) as caught:
        fetch(Source("someone/model", sharded, "abc"))
    assert caught.value.hint.endswith("run: hf download someone/model --revision abc")


def test_an_index_of_other_shards_is_named(sharded):
    text = (sharded / INDEX).read_text()
    count = len(list(sharded.glob("model-*")))
    (sharded / INDEX).write_text(text.replace(f"-of-{count:05}", "-of-00099"))
    error, hint = refusal(sharded)
    lacks = f"they lack the {INDEX} of its shards, and has"
    assert f"{lacks} one that names model-00001-of-00099" in error
    assert hint.startswith(f"copy the {INDEX}")
    (sharded / INDEX).unlink()
    assert f"{lacks} none" in refusal(sharded)[0]


def test_a_tokenizer_that_is_not_in_the_cache_is_named(tiny, tmp_path):
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(ModelUnavailable, match=r"its tokenizer\.json is not there") as caught:
        loading.load_tokenizer(Source("someone/model", tmp_path, "abc"))
    assert "run: hf download someone/model --revision abc" in caught.value.hint
    with pytest.raises(ModelUnavailable, match="no readable") as caught:
        loading.load_tokenizer(Source("tiny", tmp_path, None))
    assert "into the same folder" in caught.value.hint


def add_tensors(folder: Path, added: dict[str, list[int]], **config) -> None:
    with edited_weights(edit_config(folder, **config)) as weights:
        weights |= {name: torch.ones(shape) for name, shape in added.items()}


UNUSED = {
    "biases": ({K_BIAS: [32]}, {}),
    "head": ({"lm_head.bias": [2048]}, {}),
    "norm": ({"model.layers.0.self_attn.sink_norm.weight": [16]}, {}),
    "layer": ({"model.layers.2.mlp.up_proj.weight": [32, 32]}, {}),
    "llama": ({}, dict(model_type="llama", architectures=["LlamaForCausalLM"])),
}


@pytest.mark.parametrize("case", UNUSED)
def test_unused_tensors_of_layers_are_refused_by_name(case, copied_tiny):
    added, config = UNUSED[case]
    add_tensors(copied_tiny, added, **config)
    name = next(iter(added), "model.layers.0.self_attn.k_norm.weight")
    assert f"its weights have {name}, which its config does not use" in refusal(copied_tiny)[0]


def test_whole_parts_may_be_unused(copied_tiny):
    added = {
        "mtp.layers.0.mlp.up_proj.weight": [32, 32],
        "model.visual.blocks.0.norm.weight": [8],
        "model.layers.2.eh_proj.weight": [32, 64],
        "model.layers.1.self_attn.k_scale": [1],  # used only by servers with an FP8 cache
    }
    add_tensors(copied_tiny, added, num_nextn_predict_layers=1)
    assert load(copied_tiny)
