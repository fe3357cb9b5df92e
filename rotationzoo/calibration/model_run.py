"""The part of a calibration that needs the model's weights, step by step: load, look, check the
capture, write text, collect, fit, search."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.generate import (
    WritingSettings,
    find_end_tokens,
    read_sampling,
    write_texts,
)
from rotationzoo.calibration.plan import Job, Plan
from rotationzoo.calibration.recipe_checks import check_held_out, check_recipe, settle_centering
from rotationzoo.calibration.search.run import SearchTask, search_rotations
from rotationzoo.calibration.soundness import check_before_search
from rotationzoo.linalg.moments import Statistics, average
from rotationzoo.model import loading
from rotationzoo.model.capture import check_transparent
from rotationzoo.model.centering import layers_moved
from rotationzoo.model.geometry import Geometry, geometry_of, shifted_layers
from rotationzoo.model.placement import Placement, place_weights
from rotationzoo.progress import Progress
from rotationzoo.recipe import SELF, Recipe
from rotationzoo.rotations import Rotations
from rotationzoo.text.rows import Corpus, pack_texts
from rotationzoo.text.tokenizing import start_tokens

_CHECKED_TOKENS = 32  # of the first row, for the comparison of logits with and without capture


@dataclass(frozen=True)
class CalibrationResult:
    """What a run leaves."""

    recipe: Recipe
    """The one that was followed: keys keep their mean where the loaded model shows that they must,
    and `notes` say so."""
    geometry: Geometry
    rotations: Rotations
    statistics: Statistics | None = None
    text: Corpus | None = None
    dtype: str | None = None
    """That of the model as it was loaded; None where it was not."""
    search: dict[str, Any] | None = None
    """The record of a search, as the manifest has it."""
    notes: Sequence[str] = ()


def run_model(
    planned: Plan, source_text: Corpus | None, checkpoint: Checkpoint, progress: Progress
) -> CalibrationResult:
    """Load the model and calibrate it.

    - `source_text`: the calibration text, or prompts where the model writes the text itself; None
      where the recipe needs no statistics and only the model's geometry is missing.
    - `checkpoint`: what a stopped run left, and where this one saves.
    """
    job = planned.job
    with place_weights(job.device_map, job.max_memory) as placement:
        progress("loading the model", 0, 0)
        model = _load_model(planned, placement)
        ids = _first_tokens(model, source_text)
        geometry = planned.geometry
        if geometry is None:
            geometry = _look_at_model(model, ids, job.recipe)
        dtype = str(model.dtype).removeprefix("torch.")
        # Nothing but the geometry was missing.
        if source_text is None:
            rotations = fit(None, job.recipe, geometry)
            return CalibrationResult(job.recipe, geometry, rotations, dtype=dtype)

        progress("checking the capture", 0, 0)
        recipe, notes = _check_capture(model, ids, job.recipe, geometry)
        text = source_text
        if recipe.data.source == SELF:
            text = _write_text(planned, model, source_text, checkpoint, progress)
            checkpoint = checkpoint.of_text(text.fingerprint)
        fitted, held_out = _split_rows(text, recipe)
        batches = fitted.batches(job.batch)
        statistics = collect(model, geometry, batches, recipe, checkpoint, progress)
        progress("composing rotations", 0, 0)
        rotations = fit(statistics, recipe, geometry)
        result = CalibrationResult(
            recipe, geometry, rotations, statistics, text, dtype, notes=notes
        )
        if recipe.search is None:
            return result

        # A search takes most of a job's time, so what would be refused afterwards is refused now.
        check_before_search(rotations, average(statistics), recipe, geometry)
        task = SearchTask(model, geometry, recipe, statistics, rotations, fitted.rows, held_out)
        searched, record = search_rotations(task, _search_deadline(job), checkpoint, progress)
        return replace(result, rotations=searched, search=record)


def _load_model(planned: Plan, placement: Placement | None) -> PreTrainedModel:
    """The model with its weights; with its language-model head, where something is made of its
    predictions."""
    job = planned.job
    assert planned.config is not None
    predicts = job.recipe.search is not None or job.recipe.data.source == SELF
    return loading.load(
        planned.source, planned.config, job.torch_device, job.torch_dtype, placement, predicts
    )


def _first_tokens(model: PreTrainedModel, source_text: Corpus | None) -> torch.Tensor:
    """The first few tokens of the text as a batch `[1, T]`, or zeros where there is none."""
    zeros = torch.zeros(_CHECKED_TOKENS, dtype=torch.long)
    row = zeros if source_text is None else source_text.rows[0][:_CHECKED_TOKENS]
    return row[None].to(loading.input_device(model))


def _look_at_model(model: PreTrainedModel, ids: torch.Tensor, recipe: Recipe) -> Geometry:
    """The geometry that could not be seen on `meta`, checked as a plan checks it."""
    geometry = geometry_of(model, ids)
    check_recipe(recipe, geometry)
    return geometry


def _check_capture(
    model: PreTrainedModel, ids: torch.Tensor, recipe: Recipe, geometry: Geometry
) -> tuple[Recipe, list[str]]:
    """Check that capturing does not change the model's logits, and settle whether keys can be
    centred: the recipe to follow, and notes for the user."""
    with torch.no_grad():
        check_transparent(model, ids)
    moved = layers_moved(model, ids) if recipe.center_keys else []
    return settle_centering(recipe, sorted({*shifted_layers(geometry), *moved}))


def _write_text(
    planned: Plan,
    model: PreTrainedModel,
    prompts: Corpus,
    checkpoint: Checkpoint,
    progress: Progress,
) -> Corpus:
    """The rows that the model makes of the prompts."""
    recipe, data = planned.job.recipe, planned.job.recipe.data
    tokenizer = loading.load_tokenizer(planned.source)
    settings = WritingSettings(
        length=data.length,
        tokens=data.tokens,
        batch=planned.job.batch,
        sampling=read_sampling(planned.source),
        end_tokens=find_end_tokens(model, tokenizer),
        start_tokens=len(start_tokens(tokenizer)),
        seed=data.seed,
    )
    texts = write_texts(model, prompts.rows, settings, checkpoint, progress)
    text = pack_texts(texts, data, tokenizer)
    check_held_out(recipe, [len(row) for row in text.rows])
    notes = [note for note in (prompts.note, text.note) if note]
    return replace(text, note="; ".join(notes) or None)


def _split_rows(text: Corpus, recipe: Recipe) -> tuple[Corpus, list[torch.Tensor]]:
    """The rows to collect statistics on, and the last few, which a search makes its choices on."""
    held_out = 0 if recipe.search is None else recipe.search.held_out(len(text.rows))
    fitted = len(text.rows) - held_out
    return replace(text, rows=text.rows[:fitted]), text.rows[fitted:]


def _search_deadline(job: Job) -> float:
    """When a search that starts now is out of time, by `time.monotonic()`. Statistics are a small
    part of such a job, so a budget does not count them."""
    return math.inf if job.budget is None else time.monotonic() + 60 * job.budget
