"""The part of a calibration that needs the model's weights.

Its steps: load the model, find its geometry, check the capture, write text, collect, fit. It counts
the tokens that pass through the model in each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo import ranks
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.collect import collect, notes_of_idle
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.generate import (
    WritingSettings,
    find_end_tokens,
    read_sampling,
    write_texts,
)
from rotationzoo.calibration.plan import Plan
from rotationzoo.calibration.recipe_checks import check_recipe, settle_centering
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model import loading
from rotationzoo.model.capture import attend_as_is, check_transparent
from rotationzoo.model.centering import ShiftCheck
from rotationzoo.model.geometry import Geometry, geometry_of, shifted_layers
from rotationzoo.model.placement import Placement, place_weights
from rotationzoo.progress import Progress
from rotationzoo.recipe import SELF, Recipe
from rotationzoo.rotations import Rotations
from rotationzoo.text.rows import Corpus, pack_texts, start_tokens

OTHER = "checks"
"""The purpose of passes that nothing else claims: a few tokens that show how a model works."""


class Passes:
    """Tokens by purpose, such as `statistics`, of every pass through a model.

    A pass that ends at an early layer counts like a whole one. `tokens`: those of earlier runs
    of the job, to which the passes are added.
    """

    def __init__(self, tokens: dict[str, int] | None = None) -> None:
        self.tokens = {} if tokens is None else tokens
        self._purpose = OTHER

    @contextmanager
    def counting(self, model: PreTrainedModel) -> Iterator[None]:
        """Count the passes through a model while the block is open."""
        # The embedding, because a head that predicts from what a decoder has returned before calls
        # a decoder that computes nothing.
        embedding = model.get_input_embeddings()
        assert isinstance(embedding, torch.nn.Module)
        hook = embedding.register_forward_pre_hook(self._count)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def of(self, purpose: str) -> Iterator[None]:
        """Count what passes inside the block for a purpose."""
        outer, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = outer

    def of_all(self) -> dict[str, int]:
        """The tokens by purpose of all processes that `ranks` joins, which all call this."""
        totals: dict[str, int] = {}
        counts = {purpose: torch.tensor(count) for purpose, count in self.tokens.items()}
        for part in ranks.gather([{OTHER: torch.tensor(0), **counts}]):
            for purpose, count in part.items():
                totals[purpose] = totals.get(purpose, 0) + int(count)
        return {purpose: count for purpose, count in totals.items() if count}

    def _count(self, module: torch.nn.Module, args: Any) -> None:
        count = self.tokens.get(self._purpose, 0)
        self.tokens[self._purpose] = count + (args[0].numel() if args else 0)


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
    passes: Mapping[str, int] = field(default_factory=dict)
    """Purpose -> the tokens that passed through the model for it. Tokens of earlier runs count as
    far as their checkpoint was saved."""
    notes: Sequence[str] = ()


def run_model(
    planned: Plan, source_text: Corpus | None, checkpoint: Checkpoint, progress: Progress
) -> CalibrationResult:
    """Load the model and calibrate it.

    - `source_text`: the calibration text, or the prompts if the model writes the text itself. None
      if the recipe needs no statistics, so that the model is loaded only for its geometry.
    - `checkpoint`: what a stopped run left, and where this run saves.
    """
    job = planned.job
    placing = place_weights(job.device_map, job.max_memory, planned.pass_bytes)
    with placing as placement, ExitStack() as counting:
        progress("loading the model", 0, 0)
        model = _load_model(planned, placement)
        ids = _first_tokens(model, source_text)
        geometry = planned.geometry
        if geometry is None:
            geometry = _look_at_model(model, ids, job.recipe)
        dtype = str(model.dtype).removeprefix("torch.")
        # The model was loaded only for its geometry.
        if source_text is None:
            rotations = fit(None, job.recipe, geometry)
            return CalibrationResult(job.recipe, geometry, rotations, dtype=dtype)

        progress("checking the capture", 0, 0)
        recipe, notes = _check_capture(model, ids, job.recipe, geometry)
        text = source_text
        if recipe.data.source == SELF:
            text = _write_text(planned, model, source_text, checkpoint, progress)
            # Sums over a different text must not be resumed.
            checkpoint = checkpoint.of_text(text.fingerprint)
        batches = text.batches(job.batch)
        checkpoint.resume_counts()
        passes = Passes(checkpoint.passes)
        counting.enter_context(passes.counting(model))
        with passes.of("statistics"):
            statistics = collect(model, geometry, batches, recipe, checkpoint, progress)
        progress("composing rotations", 0, 0)
        rotations = fit(statistics, recipe, geometry)
        notes += notes_of_idle(text, job.batch)
        return CalibrationResult(
            recipe, geometry, rotations, statistics, text, dtype, passes.of_all(), notes
        )


def collect_share(planned: Plan, text: Corpus, checkpoint: Checkpoint) -> None:
    """Collect the statistics of this process's share of the text, and add them to those of the
    others. Process 0 makes the artifact of them in `run_model`."""
    job = planned.job
    with place_weights(job.device_map, job.max_memory) as placement:
        model = _load_model(planned, placement)
        ids = _first_tokens(model, text)
        geometry = planned.geometry or _look_at_model(model, ids, job.recipe)
        recipe, _ = _check_capture(model, ids, job.recipe, geometry)
        checkpoint.resume_counts()
        passes = Passes(checkpoint.passes)
        with passes.counting(model), passes.of("statistics"):
            collect(model, geometry, text.batches(job.batch), recipe, checkpoint)
        passes.of_all()


def _load_model(planned: Plan, placement: Placement | None) -> PreTrainedModel:
    """Load the model's weights, with the language-model head only if its predictions are used."""
    job = planned.job
    assert planned.config is not None
    predicts = job.recipe.data.source == SELF
    return loading.load(
        planned.source, planned.config, job.torch_device, job.torch_dtype, placement, predicts
    )


def _first_tokens(model: PreTrainedModel, source_text: Corpus | None) -> torch.Tensor:
    """The first few tokens of the text as a batch `[1, T]`, or zeros if there is no text."""
    zeros = torch.zeros(_CHECKED_TOKENS, dtype=torch.long)
    row = zeros if source_text is None else source_text.rows[0][:_CHECKED_TOKENS]
    return row[None].to(loading.input_device(model))


def _look_at_model(model: PreTrainedModel, ids: torch.Tensor, recipe: Recipe) -> Geometry:
    """Find the geometry that `meta` could not show, and check the recipe against it as a plan
    does."""
    geometry = geometry_of(model, ids)
    check_recipe(recipe, geometry)
    return geometry


def _check_capture(
    model: PreTrainedModel, ids: torch.Tensor, recipe: Recipe, geometry: Geometry
) -> tuple[Recipe, list[str]]:
    """Check that capturing does not change the model's logits, and settle whether keys can be
    centered.

    Returns the recipe to follow, and notes for the user.
    """
    shift = ShiftCheck()
    with torch.no_grad():
        check_transparent(model, ids, shift if recipe.center_keys else attend_as_is)
    return settle_centering(recipe, sorted({*shifted_layers(geometry), *shift.layers}))


def _write_text(
    planned: Plan,
    model: PreTrainedModel,
    prompts: Corpus,
    checkpoint: Checkpoint,
    progress: Progress,
) -> Corpus:
    """The rows of the texts that the model writes from the prompts."""
    data = planned.job.recipe.data
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
    notes = [note for note in (prompts.note, text.note) if note]
    return replace(text, note="; ".join(notes) or None)
