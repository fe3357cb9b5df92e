"""Adapters of strangers: peft gets no key that loads something, no name that takes for ever, and no
rank that its weights do not have."""

import json
import os
import sys
from pathlib import Path

import peft
import pytest
from support.command_line import refused
from transformers import AutoModelForCausalLM

from rotationzoo.errors import ModelUnavailable, RotationZooError
from rotationzoo.model import compatibility
from rotationzoo.model.compatibility import check_adapter, read_adapter
from rotationzoo.model.loading import load_config
from rotationzoo.model.source import find

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HANGS = "(([a-z_0-9.])+)+!$"


@pytest.fixture
def adapter(tiny, tmp_path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    config = peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change(adapter: Path, **keys) -> Path:
    table = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**table, **keys}))
    return adapter


def check(adapter: Path, model: Path) -> list[str]:
    source = find(str(model))
    return check_adapter(adapter, load_config(source), source.label)


# ---- keys


LOADING = {
    "megatron_config": {"megatron_config": {"a": 1}, "megatron_core": "evilmod"},
    "megatron_core": {"megatron_core": "evilmod"},
    "corda_config": {"corda_config": {"cache_file": "a.pt"}},
    "init_lora_weights": {"init_lora_weights": "corda"},
    "layer_replication": {"layer_replication": [[0, 1_000_000]]},
    "peft_type": {"peft_type": "XLORA", "adapters": {"a": "someone/else"}},
    "adapters": {"adapters": {"a": "someone/else"}},
    "loads_of_tomorrow": {"loads_of_tomorrow": "evilmod"},
}


@pytest.mark.hostile("path")
@pytest.mark.parametrize("name", LOADING)
def test_a_key_that_loads_something_is_refused_by_name(inside, adapter, name):
    (inside.folder / "evilmod.py").write_text("raise SystemExit('it ran')")
    change(adapter, **LOADING[name])
    error = refused(inside("evaluate", "demo", "--tasks", "none", "--adapter", adapter))
    assert f"{CONFIG} sets {name} to " in error
    assert "which is not read" in error
    assert "evilmod" not in sys.modules


@pytest.mark.hostile("size")
def test_a_start_that_computes_for_ever_is_refused(adapter):
    assert read_adapter(change(adapter, init_lora_weights="pissa_niter_16"))
    with pytest.raises(RotationZooError, match="sets init_lora_weights"):
        read_adapter(change(adapter, init_lora_weights="pissa_niter_1000000000"))


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("text", ["[]", "{", "null", '{"peft_type": "LORA", "r": "x"}'])
def test_a_config_that_is_none(adapter, tiny, text):
    (adapter / CONFIG).write_text(text)
    with pytest.raises(RotationZooError):
        check(adapter, tiny)


# ---- time


ENDLESS = HANGS.removesuffix("$")
SLOW = [
    {"target_modules": HANGS},
    {"exclude_modules": HANGS},
    {"rank_pattern": {HANGS: 2}},
    {"alpha_pattern": {ENDLESS: 2}},
    {"modules_to_save": ["(.*)*!"]},
    {"target_modules": [f"n{number}" for number in range(12_000)]},
    {"layers_to_transform": [0], "layers_pattern": ENDLESS},
]


@pytest.mark.hostile("size")
@pytest.mark.parametrize("changes", SLOW, ids=lambda changes: [*changes][-1])
def test_names_that_take_for_ever_are_given_up(adapter, tiny, changes, monkeypatch):
    monkeypatch.setattr(compatibility, "_SECONDS", 0.5)
    change(adapter, **changes)
    with pytest.raises(ModelUnavailable, match=r"does not fit the model: its names .* 0\.5 s"):
        check(adapter, tiny)


def test_expressions_that_people_write_are_read(adapter, tiny):
    texts = (
        r"(?:.*?(?:language|text).*?(?:k_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\..*(?:k|v)_proj)"
    )
    for name in (["k_proj", "v_proj"], texts, r".*\.[kv]_proj"):
        assert check(change(adapter, target_modules=name), tiny) == check(adapter, tiny)


# ---- memory


@pytest.mark.hostile("size")
@pytest.mark.parametrize(
    "keys",
    [
        {"r": 1_000_000},
        {"rank_pattern": {"k_proj": 1_000_000}},
        {"modules_to_save": ["mlp", "embed_tokens"]},
    ],
    ids=["rank", "rank of some", "whole modules"],
)
def test_more_numbers_than_the_weights_have(adapter, tiny, keys):
    with pytest.raises(ModelUnavailable, match=r"it asks for [\d,]+ numbers, and its weights"):
        check(change(adapter, **keys), tiny)


@pytest.mark.hostile("link")
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_pipe_is_not_waited_for(inside, adapter, name):
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    error = refused(inside("evaluate", "demo", "--tasks", "none", "--adapter", adapter))
    assert f"{WEIGHTS} is not a regular file" in error or "holds no adapter" in error


# ---- the base


@pytest.mark.parametrize(
    ("base", "noted"),
    [("someone/other", True), ("someone/TINY", False), ("/home/jane/tiny", False), (None, False)],
)
def test_another_base_is_noted(adapter, tiny, base, noted):
    change(adapter, base_model_name_or_path=base)
    notes = check(adapter, Path(tiny))
    assert notes == ["The adapter names the base model other, and this is tiny"] * noted
