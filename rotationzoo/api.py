"""The functions that the command line and Python callers share. They take plain values, of which a
`..._job` function makes the settings of one run.

An option that is None has the same default as one that is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.cache.rotated import check_model
from rotationzoo.calibration.calibrate import calibrate as run_calibration
from rotationzoo.calibration.memory import SIZED
from rotationzoo.calibration.plan import Job
from rotationzoo.codec.engine_needs import DEFAULT, find_engine
from rotationzoo.codec.settings import CacheOptions, Layout, Reading, Rounding
from rotationzoo.engines.reductions import choose_measures
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.arms import BASELINES
from rotationzoo.evaluation.evaluate import evaluate as run_evaluation
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.rungs import find_rungs
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.generation.generate import MAX_NEW_TOKENS, Generation, Write
from rotationzoo.generation.generate import generate as run_generation
from rotationzoo.model.compatibility import take_loaded
from rotationzoo.progress import Bars, Progress
from rotationzoo.recipe import Recipe, loading
from rotationzoo.storage.folders import default_output

QUESTION_LENGTH = 2048
"""Tokens of a row of an evaluation's text, and of its prompts."""
_ON_DISK = str | Path | Artifact
_TEXT = ("data", "tokens", "length", "seed", "subset", "split", "column")
_SEVERAL = {"tasks", "lengths", "rivals", "baselines"}
"""Options that take one value as well as several."""


class Evaluated(dict[str, Any]):
    """The object of `rotationzoo evaluate --json`, which shows itself as the decision in words."""

    def __repr__(self) -> str:
        return "\n".join(self["verdict"]["words"]) or super().__repr__()


def calibrate(
    model: str | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    output: str | Path | None = None,
    recipe: str | Recipe | None = None,
    engine: str | None = None,
    bits: float | None = None,
    key_bits: float | None = None,
    value_bits: float | None = None,
    quick: bool = False,
    feedback: bool | None = None,
    data: str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    subset: str | None = None,
    split: str | None = None,
    column: str | None = None,
    images: str | None = None,
    audio: str | None = None,
    rope_scaling: str | None = None,
    restart: bool = False,
    batch: int | None = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    max_memory: str | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Compute the rotations of a model and write them to an artifact folder.

    * `model`: a hub id, a local folder, a GGUF file, or `demo`, a small model that ships with this
      package; or a model that you loaded, which runs as it is, with its `tokenizer`;
    * `output`: the artifact folder, by default `rotations/MODEL-RECIPE`. If it already holds the
      artifact of this job, that artifact is returned unchanged. A run that was stopped resumes from
      its checkpoint;
    * `recipe`: a name, a YAML file, or a `Recipe`; by default the engine's, which is `oscar` for
      most. It decides what the options below leave open;
    * `engine`: the engine that the rotations are for, such as `vllm`;
    * `bits`: a budget: bits an element, with scales, on average over layers and sides. Layers whose
      rounding costs more get more of them, in caches of the format `fine`;
    * `key_bits`, `value_bits`: budgets of keys and of values, instead of `bits`;
    * `quick`: leave the recipe's budget out: codes of 2 bits in all layers, which take 2.25 to 3
      with their scales, and no measuring of what each loses;
    * `feedback`: store, or leave out, what a cache needs to choose codes by error feedback;
    * `data`: a data set id, a `.jsonl`, `.txt` or `.parquet` file, or `bundled`; of a data set
      `subset`, `split` and `column`;
    * `tokens`, `length`: tokens in total, and per row;
    * `seed`: sets the order of the documents;
    * `images`, `audio`: columns of the data that hold them, for a model that reads them;
    * `rope_scaling`: scale RoPE to more positions than the config has, as `yarn:4`;
    * `restart`: discard an existing checkpoint and replace an existing artifact;
    * `batch`: rows per forward pass;
    * `revision`: the branch, tag or commit of a hub id;
    * `device`, `dtype`: `auto`, `cpu` or `cuda`, and `auto`, `bfloat16` or `float32`;
    * `device_map`, `max_memory`: `auto` spreads the weights over devices, within limits such as
      `0=20GiB,cpu=64GiB`;
    * `progress`: called as `(stage, done, total)` while the job runs; by default it shows bars, and
      `rotationzoo.progress.silent` shows nothing.

    Raises `RotationZooError` for a model or recipe that cannot be calibrated. Where the config is
    enough to tell, it does so before the weights are read.
    """
    options = locals()
    return run_calibration(calibration_job(**options), progress or Bars())


def calibration_job(
    model: str | PreTrainedModel,
    output: str | Path | None = None,
    recipe: str | Recipe | None = None,
    **options: Any,
) -> Job:
    """The settings of one calibration, as `calibrate` takes them. Raises `RotationZooError` for
    settings that no recipe allows."""
    settings = _given(options)
    if not isinstance(model, str) or "tokenizer" in settings:
        check_model(model)
    source = take_loaded(model, settings)
    name = source.name if source else str(model)
    engine = find_engine(settings.get("engine", DEFAULT))
    recipe = engine.recipe if recipe is None else recipe
    chosen = loading.load(recipe) if isinstance(recipe, str) else recipe
    # The user chose neither a preset's row length nor the default budget, which may not fit.
    fit_length = isinstance(recipe, str) and recipe in loading.PRESETS and "length" not in settings
    budget = Budget(**_take(settings, ("bits", "key_bits", "value_bits")))
    fit_budget = not budget and chosen.budget == loading.load("oscar").budget
    is_quick = settings.pop("quick", False)
    if is_quick and budget:
        raise UsageError("a quick calibration has no budget of bits", "leave out --quick or --bits")
    if is_quick or (fit_budget and not engine.budget):
        chosen = loading.quicken(chosen)
    chosen = loading.override(chosen, **_take_data(settings, "images", "audio", "positions"))
    if "feedback" in settings:
        chosen = loading.with_feedback(chosen, settings.pop("feedback"))
    if budget:
        chosen = loading.with_budget(chosen, budget)
    if "rope_scaling" in settings:
        chosen = loading.with_rope_scaling(chosen, settings.pop("rope_scaling"))
    if source and chosen.rope_scaling:
        hint = "load it with such rope_parameters, and leave out rope_scaling"
        raise UsageError("a loaded model takes no rope_scaling", hint)
    folder = default_output(name, chosen.name) if output is None else Path(output).expanduser()
    # With a device map, every batch may fetch weights from disk, so fewer, larger ones are faster.
    settings.setdefault("batch", SIZED if settings.get("device_map") else chosen.data.usual_batch)
    settings |= {"fit_length": fit_length, "fit_budget": fit_budget, "source": source}
    return Job(name, chosen, folder, **settings)


def evaluate(
    model: str,
    artifacts: _ON_DISK | Sequence[_ON_DISK] = (),
    *,
    save: bool = False,
    engine: str | None = None,
    tasks: str | Sequence[str] | None = None,
    lengths: int | Sequence[int] | None = None,
    questions: int | Literal["auto"] = "auto",
    minutes: float | None = None,
    keep: float = 90,
    fewest_bits: bool = False,
    baselines: str | Sequence[str] = BASELINES,
    rivals: str | Sequence[str] = (),
    windows: tuple[int, int] | Sequence[tuple[int, int]] | None = None,
    bits: float | None = None,
    format: str | None = None,
    rounding: Rounding | None = None,
    pooled: bool | None = None,
    anyway: bool = False,
    prefill_chunk: int | None = None,
    prefill_layout: Layout | None = None,
    data: str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    subset: str | None = None,
    split: str | None = None,
    column: str | None = None,
    rope_scaling: str | None = None,
    adapter: str | Path | None = None,
    batch: int = 1,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    max_memory: str | None = None,
    progress: Progress | None = None,
) -> Evaluated:
    """Measure what a 2-bit cache costs a model, for each of several rotations.

    * `model`: a hub id, a local folder, a GGUF file, or `demo`;
    * `artifacts`: an artifact, its folder, or several of either;
    * `save`: add the report to each artifact;
    * `engine`: measure what this engine serves of the artifacts, such as `vllm`. It picks the
      format, the rounding, the windows, and one rotation per layer or KV head, unless options say
      otherwise;
    * `tasks`: one or several of the recall tasks `needles`, `key-value`, `quote`, `copy` and
      `assignments`, all by default. An empty list asks nothing;
    * `lengths`: tokens per prompt of the tasks, by default `length`;
    * `questions`: how many per task and length; `auto` asks until the decision is made;
    * `minutes`: end after about this time. As many questions are asked as fit, in one look, and
      other arms and text that do not fit are left out, with a note;
    * `keep`: percent of the exact model's answers that artifacts must keep to be served;
    * `fewest_bits`: find the fewest bits with which the one artifact, which has a budget, keeps as
      much, and evaluate these alone, without `baselines`. With `save`, they become an artifact
      beside it;
    * `baselines`: what to compare with: no rotation (`identity`), `hadamard`, a `random` rotation,
      and `kivi`;
    * `rivals`: other engines' caches to compare with, such as `fp8` and `int4_per_token_head`;
    * `windows`: pairs `(sink, recent)`: how many first and last tokens stay exact, by default the
      recipe's pair;
    * `bits`: another budget of bits an element than the artifacts', which must have one;
    * `format`: the engine's 2-bit format, such as `sglang` or `vllm`;
    * `rounding`: the codes of the arm that the decision is about: `nearest` or `feedback`;
    * `pooled`: measure each artifact with one rotation per layer, as `export --pooled` writes it;
    * `anyway`: measure artifacts that were made for other weights, too;
    * `prefill_chunk`: tokens of a prompt that are read at a time, and not one by one;
    * `prefill_layout`: which earlier tokens such a chunk reads exact, as in `RotatedCache`;
    * `data` to `column`: the held-out text, as in `calibrate`. Rows have a `length` of 2,048, of
      more where the windows leave nothing of these, and of no more than the model has positions;
    * `adapter`: the folder of a LoRA adapter of peft's, with which the model computes;
    * `rope_scaling` to `progress`: as in `calibrate`.

    Returns the report that `rotationzoo evaluate --json` prints; its `repr` is what is decided on
    each artifact, in words. `exact` is the exact model's perplexity and answers; `arms` holds
    `tasks`, `perplexity_increase`, `attention_kl` and `output_error` of each rotation. Raises
    `RotationZooError` where the model, the artifacts and the options do not fit together.
    """
    options = locals()
    return Evaluated(run_evaluation(evaluation_job(**options), progress or Bars()).report())


def evaluation_job(
    model: str, artifacts: _ON_DISK | Sequence[_ON_DISK] = (), save: bool = False, **options: Any
) -> Evaluation:
    """The settings of one evaluation, as `evaluate` takes them."""
    settings = _given(options)
    several = [artifacts] if isinstance(artifacts, str | Path | Artifact) else artifacts or ()
    folders = [_folder_of(artifact) for artifact in several]
    if "engine" in settings:
        opened = [Artifact.open(folder) for folder in folders]
        settings = choose_measures(settings.pop("engine"), opened, settings) | settings
    settings["fit_length"] = "length" not in settings
    # Only the text settings of this recipe are used; the artifacts bring their own recipes.
    text = {"length": QUESTION_LENGTH, **_take_data(settings)}
    if "adapter" in settings:
        settings["adapter"] = Path(settings["adapter"])
    if "bits" in settings:
        settings["budget"] = Budget(settings.pop("bits"))
    for name in _SEVERAL & settings.keys():
        given = settings[name]
        settings[name] = (given,) if isinstance(given, str | int) else tuple(given)
    if isinstance(next(iter(settings.get("windows", ())), None), int):
        settings["windows"] = [settings["windows"]]
    if rivals := settings.pop("rivals", ()):
        settings["baselines"] = (*settings.get("baselines", BASELINES), *rivals)
    if settings.pop("fewest_bits", False):
        settings |= {"rungs": find_rungs(folders), "baselines": ()}
    asked = _take(settings, ("lengths", "questions", "minutes"))
    if "tasks" in settings:
        asked["names"] = settings.pop("tasks")
    tasks, save_to = TaskSettings(**asked), folders if save else []
    if "tokens" not in text:
        text["tokens"] = 16384
        if isinstance(tasks.questions, int) and tasks.names:  # half as much as they read
            half = tasks.most_tokens(text["length"]) // 2
            text["tokens"] = min(16384, max(text["length"], half))
    settings["data"] = loading.override(loading.load("oscar"), **text).data
    settings |= {"tasks": tasks, "save_to": save_to, "record": True}
    return Evaluation(model, folders, **settings)


def generate(
    model: str,
    prompt: str,
    *,
    rotations: str | Path | Artifact | None,
    chat: bool = False,
    max_new_tokens: int = MAX_NEW_TOKENS,
    write: Write | None = None,
    compare: bool = False,
    anyway: bool = False,
    prefill_chunk: int = 2048,
    engine: str | None = None,
    format: str | None = None,
    bits: float | None = None,
    sink: int | None = None,
    recent: int | None = None,
    group_size: int | None = None,
    rounding: Rounding | None = None,
    prefill_layout: Layout | None = None,
    reading: Reading | None = None,
    slack: int | None = None,
    rope_scaling: str | None = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    max_memory: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Load a model and let it continue a prompt through a cache that stores 2 bits.

    * `model`: a hub id, a local folder, or `demo`;
    * `prompt`: the text to continue;
    * `rotations`: an artifact or its folder, or None for no rotation;
    * `chat`: put the prompt into the tokenizer's chat template, as a user's message;
    * `max_new_tokens`: how many tokens to write at most;
    * `write`: called with each piece of the text as soon as it is written;
    * `compare`: let the exact model continue the prompt, too;
    * `anyway`: use rotations that were made for other weights, too;
    * `prefill_chunk`: tokens of the prompt that are read at a time;
    * `engine` to `slack`: options of the cache, as in `RotatedCache`;
    * `rope_scaling` to `progress`: as in `calibrate`.

    Returns the report that `rotationzoo generate --json` prints: `text`, `tokens_per_second`,
    `cache_bytes` and `bf16_cache_bytes`, and with `compare` also `exact_text` and `parted_at`.
    The model is loaded for this one text; for several, load it yourself and give `RotatedCache` to
    its own `generate`. Raises `RotationZooError` where model, rotations and prompt do not fit
    together.
    """
    options = locals()
    if not isinstance(prompt, str):
        hint = "for token ids, give the model's own generate a RotatedCache"
        raise UsageError(f"a prompt is a text, and not of type {type(prompt).__name__}", hint)
    return run_generation(generation_job(**options), progress or Bars(), write)


def generation_job(
    model: str, prompt: str, rotations: str | Path | Artifact | None, **options: Any
) -> Generation:
    """The settings of one text, as `generate` takes them."""
    settings = _given(options)
    cache: Any = _take(settings, CacheOptions.__annotations__)
    return Generation(model, prompt, rotations, cache=cache, **settings)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a job that are given: None stands for the default, and callbacks are called by
    whoever runs the job."""
    settings = options.keys() - {"progress", "write"}
    return {name: options[name] for name in settings if options[name] is not None}


def _folder_of(artifact: _ON_DISK) -> Path:
    return artifact.folder if isinstance(artifact, Artifact) else Path(artifact).expanduser()


def _take_data(settings: dict[str, Any], *further: str) -> dict[str, Any]:
    """Take the settings of a recipe's `data` out of `settings`; the option `data` is `source`
    there."""
    text = _take(settings, (*_TEXT, *further))
    return {"source": text.pop("data", None), **text}


def _take(settings: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Take the settings with some names out of `settings`."""
    return {name: settings.pop(name) for name in names if name in settings}
