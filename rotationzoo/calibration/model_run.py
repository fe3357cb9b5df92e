"""The part of a calibration that needs the model's weights: load the model, find its geometry,
check the capture, collect, fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotationzoo.artifact.fit import fit
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.plan import Plan
from rotationzoo.calibration.recipe_checks import check_recipe, settle_centering
from rotationzoo.calibration.sensitivity import check_cache, measure_sensitivities, write_texts
from rotationzoo.codec.budget import spend_bits
from rotationzoo.errors import UnsupportedModel
from rotationzoo.geometry import Geometry, shifted_layers
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model import loading
from rotationzoo.model.capture import Call, check_transparent
from rotationzoo.model.centering import ShiftCheck
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.placement import place_weights
from rotationzoo.model.prediction import doubt_loss
from rotationzoo.model.turning import Means, add_turned_means, find_turnings, turn_means
from rotationzoo.progress import Progress
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import without_budget
from rotationzoo.rotations import Rotations
from rotationzoo.text.rows import Corpus

_CHECKED_TOKENS = 32  # of the first row; their logits are compared with and without capture


@dataclass(frozen=True)
class CalibrationResult:
    """The result of a run."""

    recipe: Recipe
    """The recipe that was followed. Keys keep their mean if the loaded model shows that they must;
    `notes` then say so."""
    geometry: Geometry
    rotations: Rotations
    statistics: Statistics | None = None
    text: Corpus | None = None
    dtype: str | None = None
    """The dtype that the model was loaded in; None if it was not loaded."""
    notes: Sequence[str] = ()


def run_model(
    planned: Plan, text: Corpus | None, checkpoint: Checkpoint, progress: Progress
) -> CalibrationResult:
    """Load the model and calibrate it, or only find its geometry where the recipe needs no text.
    The `checkpoint` is what a stopped run left, and where this run saves."""
    job = planned.job
    assert planned.config is not None
    placing = place_weights(job.device_map, job.max_memory, planned.pass_bytes)
    with placing as placement:
        progress("loading the model", 0, 0)
        # Only its decoder runs, unless predictions are compared.
        how = job.torch_device, job.torch_dtype, placement, bool(job.recipe.budget)
        model = loading.load(planned.source, planned.config, *how)
        # The first few tokens of the text, or zeros if there is none.
        row = torch.zeros(_CHECKED_TOKENS, dtype=torch.long) if text is None else text.rows[0]
        ids = row[None, :_CHECKED_TOKENS].to(loading.input_device(model))
        geometry = planned.geometry
        if geometry is None:  # which `meta` could not show
            geometry = geometry_of(model, ids)
            check_recipe(job.recipe, geometry)
        dtype = str(model.dtype).removeprefix("torch.")
        if text is None:
            rotations = fit(None, job.recipe, geometry)
            return CalibrationResult(job.recipe, geometry, rotations, dtype=dtype)

        progress("checking the capture", 0, 0)
        shift = ShiftCheck()
        function = shift if job.recipe.center_keys else Call.run
        with torch.no_grad():
            logits = check_transparent(model, ids, function)
        moved = sorted({*shifted_layers(geometry), *shift.layers})
        recipe, notes = settle_centering(job.recipe, moved)
        if recipe.budget:
            try:
                check_cache(model, ids)
            except UnsupportedModel as error:
                if not job.fit_budget:
                    raise
                recipe, reason = without_budget(recipe), str(error)
                notes.append(f"all layers have 2 bits: {reason}")
        if not (text.media or getattr(model, loading.HEADLESS, False)):
            guessed = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
            notes += doubt_loss(guessed.item(), logits.shape[-1])
        checkpoint.resume_limit()
        batches = text.media or text.batches(job.batch)
        statistics = collect(model, geometry, batches, recipe, checkpoint, progress)
        progress("composing rotations", 0, 0)
        means: Means = {}
        if recipe.turns_mean("key"):
            turnings = find_turnings(model, geometry)
            statistics, means = turn_means(statistics, geometry, turnings, recipe)
        rotations = add_turned_means(fit(statistics, recipe, geometry), means)
        if recipe.budget:
            texts = write_texts(text.rows, recipe, loading.load_tokenizer(planned.source))
            rotations = measure_sensitivities(
                model, geometry, rotations, texts, recipe.group_size, progress
            )
            rotations = spend_bits(rotations, recipe.budget, recipe.group_size)
        notes += loading.notes_of(model)
        return CalibrationResult(recipe, geometry, rotations, statistics, text, dtype, notes)
