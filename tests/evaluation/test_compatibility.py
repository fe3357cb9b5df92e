"""Artifacts, layers and texts that do not fit the model: what is refused, and what is noted."""

from dataclasses import replace

import pytest
from support.models import edited_weights, save_tiny
from support.reports import evaluate

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.job import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.recipe import Data, Recipe
from rotationzoo.text.documents import BUNDLED

SMALL = Data(tokens=1024, length=256)
ONE_ROW = Data(tokens=512, length=512)


def test_an_artifact_of_other_weights_is_refused_unless_it_is_wanted(tmp_path):
    model = save_tiny(tmp_path / "other")
    artifact = calibrate(Job(str(model), Recipe(data=SMALL), tmp_path / "made")).folder
    twin = save_tiny(tmp_path / "twin")
    with edited_weights(twin) as weights:
        weights["model.layers.0.self_attn.q_proj.weight"] *= 2
    options = dict(windows=[(4, 16)], queries=0, tasks=TaskSettings(()))
    job = Evaluation(str(twin), [artifact], ONE_ROW, **options)
    with pytest.raises(RotationZooError, match="made for other weights") as refused:
        evaluate(job)
    assert refused.value.hint.endswith("or add --anyway")
    job = replace(job, anyway=True)
    assert any("made for other weights" in note for note in evaluate(job)["notes"])


def test_an_artifact_that_was_calibrated_on_the_text_is_noted(artifacts):
    seen = Data(source=str(BUNDLED), tokens=2048, length=512)
    job = Evaluation("demo", artifacts[:1], seen, queries=0, tasks=TaskSettings(()))
    assert "oscar was calibrated on this very text" in evaluate(job)["notes"]


def test_what_does_not_fit_is_refused_before_the_weights(artifacts, tmp_path, tiny):
    with pytest.raises(RotationZooError, match="made for a model of other layers"):
        evaluate(Evaluation(str(tiny), artifacts[:1], SMALL))
    with pytest.raises(RotationZooError, match="are too short"):
        evaluate(Evaluation("demo", [], SMALL))
    with pytest.raises(UsageError, match="no attention in layer 9: it has layers 0 to 3"):
        evaluate(Evaluation("demo", [], ONE_ROW, layers={9}))
    with pytest.raises(RotationZooError, match="is no artifact"):
        evaluate(Evaluation("demo", [tmp_path], SMALL))


def test_rows_of_a_default_length_are_made_long_enough_for_the_windows(tiny, inside):
    text = Data(tokens=512, length=64)
    options = dict(windows=[(16, 100)], queries=0, tasks=TaskSettings(()), device="cpu")
    with pytest.raises(RotationZooError, match="texts of 64 tokens are too short"):
        evaluate(Evaluation(str(tiny), [], text, **options))
    report = evaluate(Evaluation(str(tiny), [], text, fit_length=True, **options))
    assert (report["text"]["length"], report["text"]["rows"]) == (256, 2)


def test_rows_of_a_default_length_have_no_more_tokens_than_the_model_has_positions(tiny, inside):
    """It has 512, fewer than the 2,048 of the default and the 4,096 that the windows ask for."""
    options = dict(windows=[(64, 256)], queries=0, tasks=TaskSettings(()), device="cpu")
    text = Data(tokens=1024, length=2048)
    report = evaluate(Evaluation(str(tiny), [], text, fit_length=True, **options))
    assert (report["text"]["length"], report["text"]["rows"]) == (512, 2)
    result = inside("evaluate", tiny, "--windows", "64/256", "--length", 2048)
    assert "texts of 2048 tokens are longer than the 512 positions" in result.stderr
    result = inside("evaluate", tiny, "--windows", "128/2048")
    assert "texts of 512 tokens are too short" in result.stderr
