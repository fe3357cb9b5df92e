"""Artifacts, layers and texts that do not fit the model, and RoPE scaling."""

from dataclasses import replace

import pytest
import transformers
from support.engine_artifacts import exported
from support.models import save_tiny
from support.reports import evaluate

from rotationzoo import RotatedCache
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.recipe import Data, Recipe
from rotationzoo.recipe.loading import with_rope_scaling
from rotationzoo.text.documents import BUNDLED

ONE_ROW = Data(tokens=512, length=512)


def job_of(model, *artifacts, text=ONE_ROW, **options) -> Evaluation:
    """An evaluation that is quick: without questions."""
    folders = [getattr(artifact, "folder", artifact) for artifact in artifacts]
    quick = {"windows": [(4, 16)], "tasks": TaskSettings(()), "device": "cpu"}
    return Evaluation(str(model), folders, text, **quick | options)


def test_an_artifact_that_was_calibrated_on_the_text_is_noted(calibrated, tiny):
    seen = calibrated.recipe.data.model_copy(update={"source": str(BUNDLED)})
    report = evaluate(job_of(tiny, calibrated, text=seen, baselines=()))
    assert "out was calibrated on this very text" in report["notes"]


@pytest.mark.parametrize(
    ("windows", "tokens", "length", "fitted"),
    [
        ((16, 100), 512, 64, 256),  # long enough for the windows
        ((64, 256), 1024, 2048, 512),  # no more than the model has positions
    ],
)
def test_rows_of_a_default_length_fit_windows_and_positions(tiny, windows, tokens, length, fitted):
    text = Data(tokens=tokens, length=length)
    job = job_of(tiny, text=text, windows=[windows])
    with pytest.raises(RotationZooError, match=f"texts of {length} tokens are (too short|longer)"):
        evaluate(job)
    report = evaluate(replace(job, fit_length=True))
    assert (report["text"]["length"], report["text"]["rows"]) == (fitted, 2)


LONG = Data(tokens=1024, length=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model of 256 positions."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256)


@pytest.fixture(scope="module")
def scaled(model, tmp_path_factory):
    """An artifact of it, calibrated on rows of 512 tokens."""
    recipe = with_rope_scaling(Recipe(data=LONG), "yarn:2.0")
    return calibrate(Job(str(model), recipe, tmp_path_factory.mktemp("scaled") / "out"))


def test_rows_longer_than_the_positions_name_the_flag(model, tmp_path):
    with pytest.raises(RotationZooError, match="longer than the 256 positions") as refusal:
        calibrate(Job(str(model), Recipe(data=LONG), tmp_path / "out"))
    assert refusal.value.hint == "add: --length 256, or --rope-scaling yarn:2"
    with pytest.raises(RotationZooError, match="texts of 512 tokens are longer") as refusal:
        evaluate(job_of(model, text=LONG))
    assert refusal.value.hint == "add: --length 256, or --rope-scaling yarn:2"


def test_evaluate_scales_as_the_artifact_was_calibrated(model, scaled):
    report = evaluate(job_of(model, scaled, text=LONG))
    assert report["rope_scaling"] == "yarn:2:256"
    # Random weights predict worse than chance, which is noted, too.
    assert report["notes"][0] == "the model's RoPE is scaled by yarn:2"
    assert len(report["notes"]) == 2
    with pytest.raises(RotationZooError, match="with the rope scaling yarn:2, not yarn:4"):
        evaluate(job_of(model, scaled, text=LONG, rope_scaling="yarn:4"))
    with pytest.raises(UsageError, match="--rope-scaling must be written as"):
        evaluate(job_of(model, text=LONG, rope_scaling="4"))


def test_a_cache_for_a_model_without_the_scaling_is_refused(model, scaled):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(RotationZooError, match="rope scaling yarn:2, and this model runs without"):
        RotatedCache(scaled, loaded)
    config = transformers.AutoConfig.from_pretrained(model)
    config.rope_parameters |= {"rope_type": "yarn", "factor": 2.0}
    config.rope_parameters["original_max_position_embeddings"] = 256
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, config=config)
    RotatedCache(scaled, loaded)


def test_an_export_says_that_the_server_must_scale(scaled, tmp_path):
    notes = " ".join(exported("sglang", scaled, tmp_path).launch.notes)
    assert "calibrated with the rope scaling yarn:2: the server must scale too" in notes
