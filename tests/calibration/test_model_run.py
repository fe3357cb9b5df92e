"""Models of all kinds from disk: spread over devices, in FP8, of other families, damaged, and with
configs that name code to run."""

import io
import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from support import architectures
from support.cases import quick_first
from support.jobs import RECIPE, SMALL, job, rotation_bytes
from support.models import edit_config, edited_weights, load_saved, save_family, save_tiny
from support.tensors import stored_statistics

from rotationzoo.calibration import plan as plans
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import SIZED, plan
from rotationzoo.checks.verify import verify
from rotationzoo.cli.inspect import summarize
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.recipe.loading import PRESETS


def test_weights_on_disk_give_the_same_statistics(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model", num_hidden_layers=4)
    recipe = RECIPE.model_copy(update={"center_keys": True})
    plain = calibrate(job(model, tmp_path / "plain", recipe, dtype="float32", batch=8))
    places, fetched = [], Counter()
    load = loading.load

    def load_and_note(*arguments, **options):
        loaded = load(*arguments, **options)
        places.extend(loaded.hf_device_map.values())
        return loaded

    fetch = OffloadedWeightsLoader.__getitem__

    def fetch_and_note(weights, name):
        fetched[name] += 1
        return fetch(weights, name)

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", fetch_and_note)
    monkeypatch.setattr(loading, "load", load_and_note)
    # Nothing but the embedding would fit in main memory: accelerate fetches the layers from disk
    # one by one.
    options = dict(dtype="float32", device_map="auto", max_memory="cpu=150KB", batch=SIZED)
    spread = calibrate(job(model, tmp_path / "spread", recipe, **options))
    assert "disk" in places
    # The checks of the capture and of centered keys share two runs, and the text is one batch.
    counts = [count for name, count in fetched.items() if ".layers." in name]
    assert len(counts) >= 9, "the weights of a layer at least"
    assert set(counts) == {3}
    statistics = stored_statistics(spread)
    for name, tensor in stored_statistics(plain).items():
        assert torch.equal(tensor, statistics[name])
    assert rotation_bytes(plain) == rotation_bytes(spread)


@pytest.mark.parametrize("name", ["gemma3-vlm", "qwen3_5-vlm", "gemma4", "mimo_v2_flash", "lfm2"])
def test_other_families_from_disk_to_a_sound_artifact(name, tmp_path):
    """Saved as their makers save them and loaded by name: vision towers, shared caches, sinks,
    unequal head dimensions."""
    save_family(name, tmp_path / "model")
    artifact = calibrate(job(tmp_path / "model", tmp_path))
    layers = [layer["layer"] for layer in summarize(artifact)]
    assert layers == [*architectures.EXPECTED[name].layers]
    assert verify(artifact, str(tmp_path / "model")).ok


@pytest.mark.parametrize("recipe", quick_first(["oscar", "hadamard"]))
def test_a_model_that_cannot_run_on_meta_is_inspected_with_its_weights(
    recipe, tiny, tmp_path, monkeypatch
):
    recipe = PRESETS[recipe].model_copy(update={"data": SMALL})
    expected = calibrate(job(tiny, tmp_path / "expected", recipe))
    monkeypatch.setattr(plans, "geometry_on_meta", lambda model: None)
    planned = plan(job(tiny, tmp_path, recipe))
    assert (planned.geometry, planned.refusal) == (None, None)
    artifact = calibrate(job(tiny, tmp_path, recipe))
    assert artifact.content["geometry"] == expected.content["geometry"]
    assert rotation_bytes(artifact) == rotation_bytes(expected)


def test_a_checkpoint_without_a_head_gives_statistics_only(tiny, copied_tiny, tmp_path):
    """A missing head would be random, and so would its predictions."""
    with edited_weights(copied_tiny) as weights:
        del weights["lm_head.weight"]
    expected = calibrate(job(tiny, tmp_path / "expected"))
    assert rotation_bytes(calibrate(job(copied_tiny, tmp_path))) == rotation_bytes(expected)
    with pytest.raises(RotationZooError, match=r"lm_head\.weight is missing from its weights"):
        load_saved(copied_tiny)


def drop_one(file: Path) -> None:
    with edited_weights(file.parent) as weights:
        del weights["model.layers.1.self_attn.q_proj.weight"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (drop_one, "model.layers.1.self_attn.q_proj.weight is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1000]), "it was cut off"),
        (lambda file: file.write_text("version https://git-lfs"), "not a safetensors file"),
        (lambda file: file.write_bytes(b""), "not a safetensors file"),
        (Path.unlink, "no complete safetensors weights"),
    ],
    ids=["a tensor", "the end", "a pointer", "empty", "gone"],
)
def test_weights_that_are_not_complete(spoil, says, copied_tiny, tmp_path):
    spoil(copied_tiny / "model.safetensors")
    with pytest.raises(RotationZooError, match=says):
        calibrate(job(copied_tiny, tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(
    copied_tiny, tmp_path, monkeypatch
):
    """Before the weights are read."""
    monkeypatch.setattr(loading, "load", None)
    with edited_weights(edit_config(copied_tiny, vocab_size=100)) as weights:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:100].clone()
    with pytest.raises(RotationZooError, match=r"makes token 2,0\d\d, and its embedding has 100"):
        calibrate(job(copied_tiny, tmp_path))


def test_code_of_a_model_is_never_run(copied_tiny, tmp_path, monkeypatch):
    """And transformers does not ask, because anything on stdin could be the answer."""
    model = copied_tiny
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    for name, classes in {
        "config.json": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.C"},
        "tokenizer_config.json": {"AutoTokenizer": ["code.C", None]},
    }.items():
        edit_config(model, name, auto_map=classes)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    calibrate(job(model, tmp_path))
    assert not (tmp_path / "ran").exists()
    edit_config(model, model_type="brand-new")
    with pytest.raises(RotationZooError, match="does not know the model type 'brand-new'"):
        calibrate(job(model, tmp_path, restart=True))
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module", params=["qwen3", "gemma3-vlm"])
def plain(request, tmp_path_factory) -> SimpleNamespace:
    """A saved model whose config names no implementation, and its artifact."""
    name = request.param
    folder = save_family(name, tmp_path_factory.mktemp("plain") / "model")
    made = calibrate(job(folder, tmp_path_factory.mktemp("expected")))
    return SimpleNamespace(name=name, folder=folder, made=made)


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    ("key", "implementation"),
    quick_first(
        [
            ("_attn_implementation", "kernels-community/flash-attn2"),
            ("attn_implementation", "someone/kernel"),
            ("_attn_implementation_internal", "flash_attention_2"),
        ]
    ),
)
def test_a_config_names_no_code_to_fetch(key, implementation, plain, tmp_path, monkeypatch):
    """Kernels on the hub are not fetched, for the model or its text part."""
    fail = lambda *_, **__: pytest.fail("asked")  # noqa: E731
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fail)
    kernels = "transformers.integrations.hub_kernels.load_and_register_attn_kernel"
    monkeypatch.setattr(kernels, fail)
    folder = Path(shutil.copytree(plain.folder, tmp_path / "model"))
    config, changes = json.loads((folder / "config.json").read_text()), {key: implementation}
    for part in config.keys() & {"text_config", "vision_config"}:
        changes[part] = {**config[part], key: implementation}
    edit_config(folder, **changes)
    config = loading.load_config(find(str(folder)))
    for model in (loading.on_meta(config, plain.name), load_saved(folder)):
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        assert {config._attn_implementation for config in configs} <= {"sdpa", "eager"}
    assert rotation_bytes(calibrate(job(folder, tmp_path / "made"))) == rotation_bytes(plain.made)


def test_a_soft_cap_is_never_dropped(tmp_path):
    """sdpa, which transformers 5.17 chooses for Gemma 2, would silently ignore it."""
    architectures.build("gemma2", attn_implementation=None).save_pretrained(tmp_path)
    config = loading.load_config(find(str(tmp_path)))
    for model in (loading.on_meta(config, "gemma2"), load_saved(tmp_path)):
        assert model.config._attn_implementation == "eager"
