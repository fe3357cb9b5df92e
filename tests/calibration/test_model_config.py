"""Configs that are damaged, or that name code to run."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import architectures
from support.jobs import job, rotation_bytes
from support.models import edit_config, save_family

from rotationzoo.calibration.job import calibrate
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.model.source import find


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("hidden_size", "wide"),
        ("model_type", "nonesuch"),
        ("model_type", None),
    ],
)
def test_damaged_configs_get_a_sentence(key, value, tiny, tmp_path):
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    edit_config(model, **{key: value})
    with pytest.raises(RotationZooError) as caught:
        calibrate(job(model, tmp_path))
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_code_of_a_model_is_never_run(tiny, tmp_path, monkeypatch):
    """Nor asked about: the question could be answered by whatever stands on stdin."""
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    for name, classes in {
        "config.json": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.C"},
        "tokenizer_config.json": {"AutoTokenizer": ["code.C", None]},
    }.items():
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**content, "auto_map": classes}))
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
    """A saved model whose config names no implementation, and the artifact that is made of it."""
    name = request.param
    folder = save_family(name, tmp_path_factory.mktemp("plain") / "model")
    made = calibrate(job(folder, tmp_path_factory.mktemp("expected")))
    return SimpleNamespace(name=name, folder=folder, made=made)


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"]
)
@pytest.mark.parametrize(
    "implementation", ["someone/kernel", "kernels-community/flash-attn2", "flash_attention_2"]
)
def test_a_config_names_no_code_to_fetch(key, implementation, plain, tmp_path, monkeypatch):
    """Not of kernels on the hub, for the model nor for its text part."""
    for place in (
        "modeling_utils.lazy_import_flash_attention",
        "integrations.hub_kernels.load_and_register_attn_kernel",
    ):
        monkeypatch.setattr(f"transformers.{place}", lambda *_, **__: pytest.fail("asked"))
    folder = Path(shutil.copytree(plain.folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    nested = {
        part: {**config[part], key: implementation}
        for part in ("text_config", "vision_config")
        if part in config
    }
    edit_config(folder, **nested, **{key: implementation})
    source = find(str(folder))
    loaded = loading.load_config(source)
    built = loading.load(source, loaded, "cpu", torch.float32)
    for model in (loading.on_meta(loaded, plain.name), built):
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        assert {config._attn_implementation for config in configs} <= {"sdpa", "eager"}
    assert rotation_bytes(calibrate(job(folder, tmp_path / "made"))) == rotation_bytes(plain.made)


def test_a_soft_cap_is_never_dropped(tmp_path):
    """sdpa, which transformers 5.17 chooses for Gemma 2, would ignore it without a word."""
    architectures.build("gemma2", attn_implementation=None).save_pretrained(tmp_path)
    source = find(str(tmp_path))
    config = loading.load_config(source)
    for model in (
        loading.on_meta(config, "gemma2"),
        loading.load(source, config, "cpu", torch.float32),
    ):
        assert model.config._attn_implementation == "eager"
