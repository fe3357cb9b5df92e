"""The functions that the command line and Python callers share. They take plain values, of which a
`..._job` function makes the settings of one run.

An option that is None has the same default as one that is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.calibration.calibrate import calibrate as run_calibration
from rotationzoo.calibration.memory import SIZED
from rotationzoo.calibration.plan import Job
from rotationzoo.codec.engines import DEFAULT, find_engine
from rotationzoo.codec.settings import CacheOptions, Layout, Reading, Rounding
from rotationzoo.engines.reductions import choose_measures
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.arms import BASELINES
from rotationzoo.evaluation.evaluate import evaluate as run_evaluation
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.rungs import find_rungs
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.generation.continuation import Generation, Write
from rotationzoo.generation.generate import generate as run_generation
from rotationzoo.model.loading import RunOptions
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.loading import (
    PRESETS,
    load,
    override,
    quicken,
    with_budget,
    with_feedback,
    with_rope_scaling,
)
from rotationzoo.storage.folders import default_output
from rotationzoo.words import nearest

_ON_DISK = str | Path | Artifact
QUESTION_LENGTH = 2048
"""Tokens of a row of an evaluation's text, and of its prompts."""


class Text(TypedDict, total=False):
    """The text that a model reads. Keys left out take the recipe's values."""

    data: str | None
    """A data set id, a `.jsonl`, `.txt` or `.parquet` file, or `bundled`."""
    tokens: int | None
    """Tokens in total."""
    length: int | None
    """Tokens per row."""
    seed: int | None
    """Sets the order of the documents."""
    subset: str | None
    split: str | None
    column: str | None
    packing: str | None


class Rows(RunOptions, total=False):
    """How rows of text run through a model."""

    batch: int | None
    """Rows per forward pass."""
    rope_scaling: str | None
    """Scale RoPE to more positions than the config has, as `yarn:4`."""


class CalibrationOptions(Text, Rows, total=False):
    """Further options of `calibrate`."""

    images: str | None
    audio: str | None
    """Columns of the data that hold images and audio, for a model that reads them."""
    positions: str | None
    """Which positions of rows with images or audio enter the statistics: `all`, the default, `text`
    or `media`."""
    engine: str | None
    """The engine that the rotations are for, such as `vllm`: it picks the recipe."""
    feedback: bool | None
    """Store, or leave out, what a cache needs to choose codes by error feedback. Without
    this option, the recipe decides."""
    bits: float | None
    """A budget: bits an element, with scales, on average over layers and sides. Layers whose
    rounding costs more get more of them, in caches of the format `fine`."""
    key_bits: float | None
    value_bits: float | None
    """Budgets of keys and of values, instead of `bits`."""
    quick: bool | None
    """Leave the recipe's budget out: 2 bits in all layers, and no measuring of what each loses."""
    restart: bool | None
    """Discard an existing checkpoint and replace an existing artifact."""
    progress: Progress
    """Called as `(stage, done, total)` while the job runs."""


class EvaluationOptions(Text, Rows, total=False):
    """Further options of `evaluate`."""

    engine: str | None
    """Measure what this engine serves of the artifacts, such as `vllm`. It picks the format, the
    rounding, the windows, and one rotation per layer or KV head, unless options say otherwise."""
    tasks: Sequence[str] | None
    """Recall tasks, all by default: `needles`, `key-value`, `quote`, `copy`, `assignments`. An
    empty list asks nothing."""
    lengths: Sequence[int] | None
    """Tokens per prompt of the tasks. Defaults to `length`."""
    questions: int | Literal["auto"] | None
    """Questions per task and length; `auto`, the default, asks until the decision is made."""
    keep: float | None
    """Percent of the exact model's answers that artifacts must keep to be served, 90 by default."""
    fewest_bits: bool | None
    """Find the fewest bits with which the one artifact, which has a budget, keeps as much, and
    evaluate these alone. With `save`, they become an artifact beside it, with the report."""
    windows: list[tuple[int, int]] | None
    """Pairs `(sink, recent)`: how many first and last tokens stay exact. Defaults to the recipe's
    pair."""
    bits: float | None
    """Another budget of bits an element than the artifacts', which must have one."""
    format: str | None
    """The engine's 2-bit format, such as `sglang` or `mlx`."""
    pooled: bool | None
    """Measure each artifact with one rotation per layer, too, as `export --pooled` writes it."""
    anyway: bool | None
    """Measure artifacts that were made for other weights, too."""
    rounding: Rounding | None
    """The codes of the arm that the decision is about."""
    layers: set[int] | None
    """Quantize only these layers."""
    sides: tuple[str, ...] | None
    """The sides to quantize. `("key",)` or `("value",)` leaves the other side exact."""
    prefill_chunk: int | None
    prefill_layout: Layout | None
    real_cache: bool | None
    """Read tasks through a cache that stores 2 bits, and not a simulation of it."""
    drift: int | None
    """Let the exact model generate so many tokens, which a cache that stores 2 bits reads, too."""
    queries: int | None
    """Queries sampled per text for the attention KL; 0 skips it."""
    baselines: tuple[str, ...] | None
    """The baselines to compare with; by default `identity`, `hadamard`, `random` and `kivi`."""
    rivals: Sequence[str] | None
    """Other engines' caches to compare with, too, such as `fp8` and `int4_per_token_head`."""
    progress: Progress


class GenerationOptions(RunOptions, total=False):
    """Further options of `generate`."""

    engine: str | None
    format: str | None
    bits: float | None
    sink: int | None
    recent: int | None
    group_size: int | None
    rounding: Rounding | None
    prefill_layout: Layout | None
    reading: Reading | None
    slack: int | None
    """The options of the cache up to here are those of `CacheOptions`."""

    chat: bool | None
    """Put the prompt into the tokenizer's chat template, as a user's message."""
    max_new_tokens: int | None
    """256 by default."""
    prefill_chunk: int | None
    """Tokens of the prompt that are read at a time, 2,048 by default."""
    anyway: bool | None
    """Use rotations that were made for other weights, too."""
    compare: bool | None
    """Let the exact model continue the prompt, too."""
    rope_scaling: str | None
    """Scale RoPE to more positions than the config has, as `yarn:4`."""
    write: Write
    """Called with each piece of the text as soon as it is written."""
    progress: Progress
    """Called as `(stage, done, total)` while the job runs."""


class Evaluated(dict[str, Any]):
    """The object of `rotationzoo evaluate --json`, which shows itself as the decision in words."""

    def __repr__(self) -> str:
        return "\n".join(self["verdict"]["words"]) or super().__repr__()


def calibrate(
    model: str,
    *,
    output: str | Path | None = None,
    recipe: str | Recipe | None = None,
    **options: Unpack[CalibrationOptions],
) -> Artifact:
    """Compute the rotations of a model and write them to an artifact folder.

    * `model`: a hub id, a local folder, or `demo`, a small model that ships with this package;
    * `output`: the artifact folder, by default `rotations/MODEL-RECIPE`. If it already holds the
      artifact of this job, that artifact is returned unchanged. A run that was stopped resumes from
      its checkpoint;
    * `recipe`: a name, a YAML file, or a `Recipe`; by default the engine's, which is `oscar` for
      most;
    * `options`: see `CalibrationOptions`.

    Raises `RotationZooError` for a model or recipe that cannot be calibrated. Where the config is
    enough to tell, it does so before the weights are read.
    """
    progress = options.pop("progress", silent)
    return run_calibration(calibration_job(model, output, recipe, **options), progress)


def calibration_job(
    model: str,
    output: str | Path | None = None,
    recipe: str | Recipe | None = None,
    **options: Unpack[CalibrationOptions],
) -> Job:
    """The settings of one calibration, as `calibrate` takes them. Raises `RotationZooError` for
    settings that no recipe allows."""
    settings = _given("calibrate", options, CalibrationOptions)
    engine = find_engine(settings.pop("engine", DEFAULT))
    recipe = engine.recipe if recipe is None else recipe
    chosen = load(recipe) if isinstance(recipe, str) else recipe
    # The user chose neither a preset's row length nor the default budget, which may not fit.
    fit_length = isinstance(recipe, str) and recipe in PRESETS and "length" not in settings
    budget = Budget(**_take(settings, ("bits", "key_bits", "value_bits")))
    fit_budget = not budget and chosen.budget == load("oscar").budget
    is_quick = settings.pop("quick", False)
    if is_quick and budget:
        raise UsageError("a quick calibration has no budget of bits", "leave out --quick or --bits")
    if is_quick or (fit_budget and not engine.budget):
        chosen = quicken(chosen)
    chosen = override(chosen, **_take_data(settings, "images", "audio", "positions"))
    if "feedback" in settings:
        chosen = with_feedback(chosen, settings.pop("feedback"))
    if budget:
        chosen = with_budget(chosen, budget)
    if "rope_scaling" in settings:
        chosen = with_rope_scaling(chosen, settings.pop("rope_scaling"))
    folder = default_output(model, chosen.name) if output is None else Path(output).expanduser()
    # With a device map, every batch may fetch weights from disk, so fewer, larger ones are faster.
    settings.setdefault("batch", SIZED if settings.get("device_map") else chosen.data.usual_batch)
    return Job(model, chosen, folder, fit_length=fit_length, fit_budget=fit_budget, **settings)


def evaluate(
    model: str,
    artifacts: _ON_DISK | Sequence[_ON_DISK] = (),
    *,
    save: bool = False,
    **options: Unpack[EvaluationOptions],
) -> Evaluated:
    """Measure what a 2-bit cache costs a model, for each of several rotations.

    * `model`: a hub id, a local folder, or `demo`;
    * `artifacts`: an artifact, its folder, or several of either. The baselines measured with them
      are no rotation (`identity`), `hadamard`, a `random` rotation, and `kivi`;
    * `save`: add the report to each artifact;
    * `options`: see `EvaluationOptions`. The default is to read 16,384 tokens of held-out text in
      rows of 2,048, of more where the windows leave nothing of these, and of no more than the model
      has positions.

    Returns the report that `rotationzoo evaluate --json` prints; its `repr` is what is decided on
    each artifact, in words. `exact` is the exact model's perplexity and answers; `arms` holds
    `tasks`, `perplexity_increase`, `attention_kl` and `output_error` of each rotation. Raises
    `RotationZooError` where the model, the artifacts and the options do not fit together.
    """
    progress = options.pop("progress", silent)
    job = evaluation_job(model, artifacts, save, **options)
    return Evaluated(run_evaluation(job, progress).report())


def evaluation_job(
    model: str,
    artifacts: _ON_DISK | Sequence[_ON_DISK] = (),
    save: bool = False,
    **options: Unpack[EvaluationOptions],
) -> Evaluation:
    """The settings of one evaluation, as `evaluate` takes them."""
    settings = _given("evaluate", options, EvaluationOptions)
    several = [artifacts] if isinstance(artifacts, str | Path | Artifact) else artifacts
    folders = [_folder_of(artifact) for artifact in several]
    if "engine" in settings:
        opened = [Artifact.open(folder) for folder in folders]
        settings = choose_measures(settings.pop("engine"), opened, settings) | settings
    settings["fit_length"] = "length" not in settings
    # Only the text settings of this recipe are used; the artifacts bring their own recipes.
    text = {"tokens": 16384, "length": QUESTION_LENGTH, **_take_data(settings)}
    settings["data"] = override(load("oscar"), **text).data
    if "bits" in settings:
        settings["budget"] = Budget(settings.pop("bits"))
    asked = _take(settings, ("lengths", "questions"))
    if "tasks" in settings:
        asked["names"] = tuple(settings.pop("tasks"))
    if "lengths" in asked:
        asked["lengths"] = tuple(asked["lengths"])
    if rivals := settings.pop("rivals", ()):
        settings["baselines"] = (*settings.get("baselines", BASELINES), *rivals)
    if settings.pop("fewest_bits", False):
        if len(folders) != 1:
            raise UsageError("the fewest bits are found of one artifact", "give its folder alone")
        settings["rungs"] = tuple(find_rungs(Artifact.open(folders[0])))
        settings.setdefault("baselines", ())
    save_to = folders if save else []
    settings |= {"tasks": TaskSettings(**asked), "save_to": save_to, "record": True}
    return Evaluation(model, folders, **settings)


def generate(
    model: str,
    prompt: str,
    *,
    rotations: str | Artifact | None,
    **options: Unpack[GenerationOptions],
) -> dict[str, Any]:
    """Load a model and let it continue a prompt through a cache that stores 2 bits.

    * `model`: a hub id, a local folder, or `demo`;
    * `prompt`: the text to continue;
    * `rotations`: an artifact or its folder, a name in the zoo, which is pulled, or None for no
      rotation;
    * `options`: see `GenerationOptions`.

    Returns the report that `rotationzoo generate --json` prints: `text`, `tokens_per_second`,
    `cache_bytes` and `bf16_cache_bytes`, and with `compare` also `exact_text` and `parted_at`.
    The model is loaded for this one text; for several, load it yourself and give `RotatedCache` to
    its own `generate`. Raises `RotationZooError` where model, rotations and prompt do not fit
    together.
    """
    if not isinstance(prompt, str):
        raise UsageError(
            f"a prompt is a text, and not of type {type(prompt).__name__}",
            hint="for token ids, give the model's own generate a RotatedCache",
        )
    progress, write = options.pop("progress", silent), options.pop("write", None)
    return run_generation(generation_job(model, prompt, rotations, **options), progress, write)


def generation_job(
    model: str,
    prompt: str | None,
    rotations: str | Artifact | None,
    **options: Unpack[GenerationOptions],
) -> Generation:
    """The settings of one text, as `generate` takes them."""
    settings = _given("generate", options, GenerationOptions)
    cache: Any = _take(settings, CacheOptions.__annotations__)
    return Generation(model, prompt, rotations, cache=cache, **settings)


def _given(function: str, options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """The options of a function that are given: None stands for its default. Raises `UsageError`
    for an option that it does not have."""
    names = known.__annotations__
    if unknown := options.keys() - names:
        name = min(unknown)
        raise UsageError(
            f"{function} has no option {name!r}{nearest(name, names)}",
            hint=f"rotationzoo.api.{known.__name__} lists them",
        )
    return {name: value for name, value in options.items() if value is not None}


def _folder_of(artifact: _ON_DISK) -> Path:
    return artifact.folder if isinstance(artifact, Artifact) else Path(artifact).expanduser()


def _take_data(settings: dict[str, Any], *further: str) -> dict[str, Any]:
    """Take the settings of a recipe's `data` out of `settings`; the option `data` is `source`
    there."""
    text = _take(settings, (*Text.__annotations__, *further))
    return {"source": text.pop("data", None), **text}


def _take(settings: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Take the settings with some names out of `settings`."""
    return {name: settings.pop(name) for name in names if name in settings}
