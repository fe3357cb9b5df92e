"""`--for ENGINE`: what is measured and read is what the engine serves."""

import json
from dataclasses import replace

import pytest
import torch
from support.cases import quick_first
from support.command_line import SMALL, only_error, succeeded
from support.models import save_family, save_tiny
from support.recipes import CODED
from support.reports import evaluate
from support.vllm import pretend, server_settings

from rotationzoo.api import calibrate, evaluation_job, generate
from rotationzoo.artifact.reductions import Request
from rotationzoo.cache.rotated import build_settings
from rotationzoo.codec.options import CacheOptions
from rotationzoo.engines.export import export
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation import evaluate as evaluation_module
from rotationzoo.evaluation.arms import build_arms
from rotationzoo.evaluation.probes import record_probes
from rotationzoo.model.source import find
from rotationzoo.rotations import SIDES
from rotationzoo.settings import EvaluationSettings
from rotationzoo.vllm import plugin

SHORT = dict(tokens=64, length=32, tasks=())
WORDS = ["--tasks", "none", "--tokens", "1024", "--length", "512"]


@pytest.fixture(scope="module")
def tiny_of_heads(tmp_path_factory):
    """A tiny model with two KV heads, and an artifact of it with every part that engines lose."""
    folder = tmp_path_factory.mktemp("heads")
    model = save_tiny(folder / "model", num_key_value_heads=2)
    recipe = CODED.model_copy(update={"sink": 8, "recent": 16})
    options = dict(bits=3.5, tokens=1024, length=256, device="cpu")
    artifact = calibrate(str(model), output=folder / "made", recipe=recipe, **options)
    assert artifact.rotations.per_head
    assert artifact.rotations.has_transform
    assert artifact.recipe.centered == ("key", "value")
    assert len({each.widths.sum().item() for _, _, each in artifact.rotations.each()}) > 1
    return str(model), artifact


def written(path) -> dict:
    """The keys' matrices of a `.pt` file by layer."""
    (file,) = path.glob("k_rotation*.pt")
    layers = torch.load(file, weights_only=True)["layers"]
    return {layer: entry["rotation"] for layer, entry in layers.items()}


@pytest.mark.parametrize("engine", ["vllm-oscar", "sglang"])
def test_what_is_measured_is_what_is_written(tiny_of_heads, tmp_path, engine):
    """Evaluation and `generate` rotate with the very matrices of the files, and the same means."""
    model, artifact = tiny_of_heads
    done = export(artifact, Request(engine, tmp_path / "out"))
    matrices = written(done.path)
    job = evaluation_job(EvaluationSettings(model, artifact, engine=engine))
    arms = build_arms([artifact], artifact.geometry, (), job.pooled, job.uncentered)
    judged = arms[-1] if job.pooled else arms[0]
    settings = build_settings(artifact, _loaded(model), CacheOptions(engine=engine))
    for rotations in (judged.codec.rotations, settings.codec.rotations):
        for layer, matrix in matrices.items():
            key = rotations[layer].key
            assert torch.equal(key.matrix.squeeze(0), matrix)
            assert (key.mean is None) == (engine == "vllm-oscar")
    assert settings.codec.rounding == "nearest"
    served = (settings.layout.sink, settings.layout.recent)
    assert served == ((0, 0) if engine == "vllm-oscar" else (8, 16))
    assert job.windows == ([(0, 0)] if engine == "vllm-oscar" else [])


def _loaded(model: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


def test_vllm_is_measured_and_read_as_serve_serves_it(tiny_of_heads):
    model, artifact = tiny_of_heads
    served = server_settings(model, artifact.folder)
    read = build_settings(artifact, _loaded(model), CacheOptions(engine="vllm"))
    assert read.layout == served.layout
    assert served.layout.prefill_layout == "window"
    assert read.codec.rounding == served.codec.rounding == "transform"
    for layer, side, _ in artifact.rotations.each():
        pages = [each.page_layout(layer, side) for each in (read, served)]
        assert pages[0] == pages[1]
    job = evaluation_job(EvaluationSettings(model, artifact, engine="vllm", prefill_chunk=64))
    assert (job.format, job.prefill_layout) == ("segments", "window")
    assert job.notes[0] == "Lost for vllm: nothing"
    assert (job.pooled, job.uncentered) == (False, ())


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model with a sliding window in all layers but the last, and an artifact with a budget."""
    folder = tmp_path_factory.mktemp("windows")
    model = str(save_family("gemma3", folder / "model", head_dim=64))
    recipe = CODED.model_copy(update={"sink": 2, "recent": 4})
    options = dict(bits=3.5, tokens=64, length=32, device="cpu")
    return model, calibrate(model, output=folder / "made", recipe=recipe, **options)


@pytest.mark.parametrize("chosen", quick_first([{"format": "sglang"}, {}, {"format": "segments"}]))
@pytest.mark.parametrize("layers", quick_first([{3}, None]))
def test_beside_windows_is_measured_what_serve_stores(windowed, monkeypatch, chosen, layers):
    model, artifact = windowed
    served = server_settings(model, artifact.folder, **chosen)
    trials = []

    def keep(_model, _batches, trial, *others):
        trials.append(trial)
        raise RotationZooError("enough")

    monkeypatch.setattr(evaluation_module, "run_models", keep)
    job = evaluation_job(EvaluationSettings(model, artifact, engine="vllm", **chosen, **SHORT))
    job = replace(job, layers=layers)
    with pytest.raises(RotationZooError, match="enough"):
        evaluate(job)
    (trial,) = trials
    assert trial.layers == [3]
    (cache,) = trial.caches
    made = [arm for arm in trial.arms if arm.name.startswith("made")]
    (arm,) = (arm for arm in made if arm.about.rounding == served.codec.rounding)
    for side in SIDES:
        measured = arm.codec.page_layout(3, side, 64, cache.format)
        assert measured == served.codec.page_layout(3, side, 64, served.layout.format)


@pytest.mark.parametrize("options", [{"format": "sglang"}, {"engine": "sglang"}])
def test_another_budget_is_refused_where_rows_have_the_same_bits(tiny_of_heads, options):
    model, artifact = tiny_of_heads
    with pytest.raises(UsageError, match="have the same bits in all layers"):
        evaluate(evaluation_job(EvaluationSettings(model, artifact, bits=3.25, **options, **SHORT)))
    with pytest.raises(UsageError, match="have the same bits in all layers"):
        generate(model, "a b", rotations=artifact, bits=3.25, **options)
    if "format" in options:
        with pytest.raises(UsageError, match="have the same bits in all layers"):
            server_settings(model, artifact.folder, bits=3.25, **options)
    with pytest.raises(UsageError, match="and none have"):
        evaluate(evaluation_job(EvaluationSettings(model, bits=3.25, **SHORT)))
    with pytest.raises(UsageError, match="and none have"):
        generate(model, "a b", rotations=None, bits=3.25)


def test_beside_windows_nothing_is_recorded_that_no_server_answers(windowed):
    model, artifact = windowed
    with pytest.raises(RotationZooError, match="keeps layers with a sliding window exact"):
        record_probes(_loaded(model), None, artifact, find(model))


def test_where_all_layers_have_a_window_nothing_is_served_in_2_bits(inside, tmp_path, monkeypatch):
    changes = dict(use_sliding_window=True, sliding_window=64, max_window_layers=0)
    model = save_tiny(tmp_path / "model", **changes)
    succeeded(inside("calibrate", model, *SMALL, "-o", "made"))
    refused = inside("evaluate", model, "made", "--for", "vllm", *WORDS)
    assert "every layer of" in only_error(refused, 2)
    pretend(monkeypatch, plugin.CPU_PACKAGE)
    served = inside("serve", model, "--rotations", "made", "--dry-run")
    assert "Every layer has a sliding window" in served.stderr
    assert "Serving codes" not in served.stderr


def test_the_line_says_what_is_picked_and_what_is_lost(inside, tiny_of_heads):
    model, artifact = tiny_of_heads
    words = "evaluate", model, artifact.folder, "--for", "sglang"
    result = succeeded(inside(*words, *WORDS, "--json"))
    lost = "values that keep their mean; nearest codes instead of transform coding"
    line = f"Lost for sglang: {lost}"
    assert line in result.stderr
    assert json.loads(result.stdout)["notes"][0] == line
    words = "generate", model, "--rotations", artifact.folder, "--for", "sglang", "-p", "a b"
    result = succeeded(inside(*words, "--max-new-tokens", "1", "--json"))
    assert line in result.stderr
    assert json.loads(result.stdout)["format"] == "sglang"


def test_the_next_command_is_for_the_same_engine_and_after_an_export_starts_it(inside, tiny):
    made = succeeded(inside("calibrate", tiny, *SMALL, "--for", "vllm-oscar", "-o", "made"))
    assert "For vllm-oscar: recipe oscar-v1" in made.stderr
    assert made.stderr.endswith(f"Next: rotationzoo evaluate {tiny} made --for vllm-oscar --save\n")
    result = inside("export", "made", "--for", "vllm-oscar", "-o", "out")
    assert result.stderr.endswith("\nNext: start the engine with\n"), result.stderr
    assert result.stdout.endswith("--kv-cache-dtype oscar_int2\n"), "the last line starts it"
    result = inside("export", "made", "--to", "vllm")
    assert result.stdout == f"rotationzoo serve {tiny} --rotations made\n"
