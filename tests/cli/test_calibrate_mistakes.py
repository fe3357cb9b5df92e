"""Every mistake one can make with `calibrate`: one sentence, and nothing left behind."""

import json
import resource
from itertools import product

import pytest
import transformers
from support import architectures
from support.cases import quick_first
from support.command_line import SMALL, left_behind, only_error
from support.models import edit_config, save_family, save_tiny, write_jsonl

from rotationzoo.errors import RotationZooError


def test_a_dry_run_names_what_is_missing(inside, monkeypatch):
    """A tokenizer, and memory."""
    folder = save_tiny(inside.folder / "tiny")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    shown = inside("calibrate", "tiny", "--tokens", "256", "--length", "128", "--dry-run")
    quick = inside("calibrate", "tiny", "--quick", "--dry-run")
    assert ("(segments)" in shown.stdout, "(segments)" in quick.stdout) == (True, False)
    assert "Note: it cannot be calibrated yet: tiny has no readable tokenizer" in shown.stderr
    assert "Next: rotationzoo calibrate tiny --tokens 256 --length 128\n" in shown.stderr
    monkeypatch.setattr("rotationzoo.calibration.plan.total_memory", lambda *_, **__: 1000)
    shown = inside("calibrate", "tiny", "--tokens", "256", "--length", "128", "--dry-run")
    assert shown.stderr.endswith("--length 128 --device-map auto\n")


def test_missing_tokens_and_rows_left_out_are_said_before_the_model_runs(inside, monkeypatch):
    def stop(*_: object) -> None:
        raise RotationZooError("stopped", hint="go on")

    for module in ("calibration.calibrate", "evaluation.evaluate"):
        monkeypatch.setattr(f"rotationzoo.{module}.fetch_weights", stop)
    (inside.folder / "short.txt").write_text("a few words\n" * 200)
    rows = [{"text": "a few words " * 9} for _ in range(200)]
    rows[136] = {"text": 5}
    write_jsonl(inside.folder / "rows.jsonl", rows)
    notes = {
        "short.txt": "1,152 tokens instead of 32,768: all of short.txt",
        "rows.jsonl": "all of rows.jsonl; 1 of 200 rows left out, the first in line 137",
    }
    commands = ["calibrate"], ["evaluate", "--windows", "8/8"], ["calibrate", "--dry-run"]
    for words, (file, note) in product(commands, notes.items()):
        shown = inside(*words, "demo", "--data", file, "--length", "128", "--tokens", "32768")
        assert shown.returncode == (0 if "--dry-run" in words else 1)
        assert note in shown.stderr
    refused = inside("calibrate", "demo", "--data", "short.txt")
    assert "short.txt has 1,201 tokens, too few for a row of 8,192" in refused.stderr


@pytest.mark.parametrize("words", quick_first([["plan"], ["calibrate", "--dry-run"], ["evaluate"]]))
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 7}),
        ("llama", {"num_attention_heads": 32, "num_key_value_heads": 64}),
        ("gemma3", {"num_key_value_heads": 3}),
        ("mistral", {"num_key_value_heads": 0}),
        ("llama", {"head_dim": 0}),
        ("qwen3", {"head_dim": -16}),
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"num_hidden_layers": -1}),
        ("llama", {"num_attention_heads": 5, "head_dim": None}),
        ("qwen3", {"hidden_size": "wide"}),
        ("mistral", {"num_hidden_layers": "4"}),
        ("qwen3", {"model_type": "nonesuch"}),
        ("qwen3", {"model_type": None}),
    ],
    ids=str,
)
def test_an_impossible_config_is_refused_with_its_numbers(inside, words, family, changes):
    folder = save_family(family, inside.folder / "it", weights=False)
    edit_config(folder, **changes)
    says = only_error(inside(words[0], "it", *words[1:]))
    assert "weights" not in says
    said = says.replace("model type", "model_type")
    for key, value in changes.items():
        assert value is None or (key in said and str(value) in said) or "size (64)" in said, said


def test_models_that_cannot_be_calibrated(inside):
    models = inside.folder.parent
    long = dict(max_position_embeddings=4096)
    configs = {
        "is an encoder": transformers.BertConfig(**long, architectures=["BertForMaskedLM"]),
        "is an encoder-decoder": transformers.T5Config(),
        "is not a causal language model": transformers.ViTConfig(),
        "compressed latent": architectures.config("deepseek_v4", **long),
        "its own code": architectures.config("falcon", **long),
    }
    for number, (says, config) in enumerate(configs.items()):
        config.save_pretrained(models / str(number))
        assert says in only_error(inside("calibrate", models / str(number)))
        planned = inside("calibrate", models / str(number), "--dry-run", "--json")
        assert planned.returncode == 0
        assert says in json.loads(planned.stdout)["refusal"]
    assert left_behind(inside) == []


def test_a_disk_that_fills_up(command):
    """A limit on file sizes stands for a disk that is full after some blocks: the write fails
    half-way."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    # At the first checkpoint, and while the artifact is written.
    for recipe in ("oscar", "hadamard"):
        words = ["calibrate", "demo", "--recipe", recipe, *SMALL]
        says = only_error(command(*words, preexec_fn=limit))
        assert "cannot be written" in says
        assert "Hint: make room, or " in says
        assert left_behind(command) == []
