"""What the command line and Python callers share. `..._job` completes the settings of a run."""

from pathlib import Path
from typing import Any

from rotationzoo.artifact.reductions import describe_losses
from rotationzoo.artifact.scores import FLOOR
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.calibration.calibrate import calibrate as run_calibration
from rotationzoo.calibration.plan import SIZED, Job
from rotationzoo.codec.engine_needs import DEFAULT, choose_format, find_engine
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.arms import BASELINES
from rotationzoo.evaluation.evaluate import evaluate as run_evaluation
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.rungs import find_rungs
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.generation.generate import generate as run_generation
from rotationzoo.progress import Bars
from rotationzoo.recall.questions import TASKS
from rotationzoo.recipe import loading
from rotationzoo.settings import CalibrationSettings, EvaluationSettings, GenerationSettings
from rotationzoo.settings_base import as_tuple, takes
from rotationzoo.storage.folders import default_output

_LENGTH = 2048  # tokens of a row of an evaluation's text, and of its prompts
_TOKENS = 16384  # of its text, unless the questions are few


class Evaluated(dict[str, Any]):
    """The object of `rotationzoo evaluate --json`, whose `repr` is the decision in words."""

    def __repr__(self) -> str:
        return "\n".join(self["verdict"]["words"]) or super().__repr__()


@takes(CalibrationSettings)
def calibrate(settings: CalibrationSettings) -> Artifact:
    """Compute the rotations of a model and write them to an artifact folder.

    * `model`: a hub id, a local folder, a GGUF file, or `demo`, a small model that ships with this
      package;
    * `output`: the artifact folder, by default `rotations/MODEL-RECIPE`. If it holds the artifact
      of this job, that artifact is returned unchanged. A stopped run resumes from its checkpoint;
    * `recipe`: a name, a YAML file, or a `Recipe`; by default the engine's, which is `transform`
      for most. It sets the defaults of the options below;
    * `engine`: the engine that the rotations are for, such as `vllm`;
    * `bits`: a budget of bits an element, with scales, on average over channels. Channels whose
      errors cost more get more. `key_bits`, `value_bits`: budgets of keys and values instead;
    * `quick`: the recipe `oscar`: 2-bit codes, 2.25 to 3 bits with their scales, without measuring
      what errors cost;
    * `data`: a data set id with its `subset`, `split` and `column`, a `.jsonl`, `.txt` or
      `.parquet` file, or `bundled`;
    * `tokens`, `length`, `seed`: tokens in total and per row, and the order of the documents;
    * `images`, `audio`: columns of the data that hold them, for a model that reads them;
    * `rope_scaling`: scale RoPE to more positions than the config has, as `yarn:4`;
    * `restart`: discard an existing checkpoint and replace an existing artifact;
    * `batch`: rows per forward pass; `revision`: the branch, tag or commit of a hub id;
    * `device`, `dtype`: `auto`, `cpu` or `cuda`, and `auto`, `bfloat16` or `float32`;
    * `device_map`, `max_memory`: `auto` spreads the weights over devices, within limits such as
      `0=20GiB,cpu=64GiB`;
    * `progress`: called as `(stage, done, total)` while the job runs; by default it shows bars, and
      `rotationzoo.progress.silent` shows nothing.

    Raises `RotationZooError` for a model or recipe that cannot be calibrated, before the weights
    are read if the config shows it.
    """
    return run_calibration(calibration_job(settings), settings.progress or Bars())


def calibration_job(asked: CalibrationSettings) -> Job:
    """The job of these settings. Raises `RotationZooError` for settings that exclude each other."""
    engine = find_engine(asked.engine or DEFAULT)
    recipe = asked.recipe or engine.recipe
    if asked.quick:
        if asked.recipe or asked.budget:
            problem = "a quick calibration has a recipe of its own, without a budget of bits"
            raise UsageError(problem, "leave out --quick, or --recipe and --bits")
        recipe = "oscar" if engine.heads else engine.recipe
    chosen = loading.load(recipe) if isinstance(recipe, str) else recipe
    # A preset's row length and the default budget were not chosen, and may not fit.
    fit_length = isinstance(recipe, str) and recipe in loading.PRESETS and asked.length is None
    chosen = loading.override(chosen, **asked.text, images=asked.images, audio=asked.audio)
    if asked.budget:
        chosen = loading.with_budget(chosen, asked.budget)
    if asked.rope_scaling is not None:
        chosen = loading.with_rope_scaling(chosen, asked.rope_scaling)
    output = Path(asked.output or default_output(asked.model, chosen.name))
    # With a device map, every batch may read weights from disk: larger ones are faster.
    usual = chosen.data.usual_batch if asked.device_map is None else SIZED
    return Job(
        model=asked.model,
        recipe=chosen,
        output=output.expanduser(),
        batch=usual if asked.batch is None else asked.batch,
        engine=asked.engine or DEFAULT,
        restart=asked.restart,
        fit_length=fit_length,
        **asked.run_options,
    )


@takes(EvaluationSettings)
def evaluate(settings: EvaluationSettings) -> Evaluated:
    """Measure what a 2-bit cache costs a model, for each of several rotations.

    * `model`: a hub id, a local folder, a GGUF file, or `demo`;
    * `artifacts`: an artifact, its folder, or several of either;
    * `save`: add the report to each artifact;
    * `engine`: measure what this engine, such as `vllm`, serves of the artifacts. It sets the
      default format, windows, and one rotation per layer or KV head;
    * `tasks`: one or several of the recall tasks `needles`, `key-value`, `quote`, `copy` and
      `assignments`, all by default. An empty list asks nothing;
    * `lengths`: tokens per prompt of the tasks, by default `length`;
    * `questions`: how many per task and length; `auto` asks until the decision is made;
    * `minutes`: stop after about this time. All questions that fit are asked before one decision;
      other arms and text that do not fit are left out, with a note;
    * `keep`: percent of the exact model's answers to keep, by default 90;
    * `fewest_bits`: find the fewest bits that keep as much, for one artifact with a budget, and
      evaluate only these, without `baselines`. With `save`, they become an artifact next to it;
    * `baselines`: what to compare with: `identity` (no rotation), `hadamard`, `random` and `kivi`;
    * `rivals`: other engines' caches to compare with, such as `fp8` and `int4_per_token_head`;
    * `windows`: pairs of how many first and last tokens stay exact, by default the recipe's pair;
    * `bits`: another budget of bits an element than the artifacts', which must have one;
    * `format`: the engine's 2-bit format, such as `sglang` or `vllm`;
    * `pooled`: measure each artifact with one rotation per layer, as `export --pooled` writes it;
    * `anyway`: also measure artifacts that were made for other weights;
    * `prefill_chunk`: prefill in chunks of this many tokens, not one by one;
    * `prefill_layout`: which earlier tokens such a chunk reads exact, as in `RotatedCache`;
    * `data`, `subset`, `split`, `column`, `tokens`, `length`, `seed`: the held-out text, as in
      `calibrate`. The default `length` is 2,048, longer if the windows leave nothing of these
      tokens, and at most the model's positions;
    * `batch`: texts per forward pass;
    * `rope_scaling`, `revision` to `max_memory`, `progress`: as in `calibrate`.

    Returns the report that `rotationzoo evaluate --json` prints; its `repr` is the decision on each
    artifact in words. `exact` is the exact model's perplexity and answers; `arms` holds `tasks` and
    `perplexity_increase` of each rotation. Raises `RotationZooError` if the model, the artifacts
    and the options do not fit together.
    """
    report = run_evaluation(evaluation_job(settings), settings.progress or Bars())
    return Evaluated(report.report())


def evaluation_job(asked: EvaluationSettings) -> Evaluation:
    """The job of these settings. Raises `RotationZooError` for an engine whose cache cannot be
    simulated, and if the fewest bits cannot be found."""
    folders, notes = asked.folders, list[str]()
    uncentered, leaves_windows = tuple[str, ...](), False
    if asked.engine is not None:
        engine, opened = find_engine(asked.engine), [Artifact.open(folder) for folder in folders]
        uncentered, leaves_windows = engine.uncentered, not engine.sliding
        notes = [describe_losses(asked.engine, opened)]
        asked = _as_engine(asked, opened)
    asked = asked.complete(baselines=BASELINES, tasks=TASKS)
    names, lengths = as_tuple(asked.tasks), as_tuple(asked.lengths)
    tasks = TaskSettings(names, lengths, asked.questions, minutes=asked.minutes)
    text = {"length": _LENGTH, "tokens": _TOKENS, **asked.text}
    if asked.tokens is None and isinstance(tasks.questions, int) and tasks.names:
        half = tasks.most_tokens(text["length"]) // 2  # of what the prompts have
        text["tokens"] = min(_TOKENS, max(text["length"], half))
    windows, rungs = as_tuple(asked.windows), tuple[Budget, ...]()
    baselines = as_tuple(asked.baselines) + as_tuple(asked.rivals)
    if windows and isinstance(windows[0], int):
        windows = (windows,)
    if asked.fewest_bits:
        baselines, rungs = (), find_rungs(folders)
    return Evaluation(
        asked.model,
        folders,
        loading.override(loading.load("oscar"), **text).data,
        tasks,
        list(windows),
        asked.format,
        Budget(asked.bits) or None,
        rungs,
        asked.anyway,
        prefill_chunk=asked.prefill_chunk,
        prefill_layout=asked.prefill_layout,
        rope_scaling=asked.rope_scaling,
        baselines=baselines,
        pooled=bool(asked.pooled),
        uncentered=uncentered,
        engine=asked.engine,
        leaves_windows=leaves_windows,
        notes=notes,
        batch=asked.batch,
        save_to=folders * asked.save,
        record=True,
        fit_length=asked.length is None,
        keep=100 * FLOOR if asked.keep is None else asked.keep,
        **asked.run_options,
    )


def _as_engine(asked: EvaluationSettings, artifacts: list[Artifact]) -> EvaluationSettings:
    """The settings that measure what an engine serves. Raises `UsageError` if none simulates it."""
    engine = find_engine(asked.engine or DEFAULT)
    has_budget = any(artifact.rotations.has_budget for artifact in artifacts)
    chosen: dict[str, Any] = {
        "format": choose_format(asked.engine or DEFAULT, has_budget),
        "pooled": not engine.heads and any(each.rotations.per_head for each in artifacts),
    }
    if not engine.windows:
        chosen["windows"] = (0, 0)
    if asked.prefill_chunk:
        chosen["prefill_layout"] = engine.prefill_layout
    return asked.complete(**chosen)


@takes(GenerationSettings)
def generate(settings: GenerationSettings) -> dict[str, Any]:
    """Load a model and let it continue a prompt through a cache that stores 2 bits.

    * `model`: a hub id, a local folder, or `demo`;
    * `prompt`: the text to continue;
    * `rotations`: an artifact or its folder, or None for no rotation;
    * `chat`: put the prompt into the tokenizer's chat template, as a user's message;
    * `max_new_tokens`: the most tokens to write, by default 256;
    * `write`: called with each piece of the text as soon as it is written;
    * `compare`: also let the exact model continue the prompt;
    * `anyway`: also use rotations that were made for other weights;
    * `prefill_chunk`: prompt tokens that are read at a time;
    * `engine` to `slack`: options of the cache, as in `RotatedCache`;
    * `rope_scaling`, `revision` to `max_memory`, `progress`: as in `calibrate`.

    Returns the report that `rotationzoo generate --json` prints: `text`, `tokens_per_second`,
    `cache_bytes` and `bf16_cache_bytes`, and with `compare` also `exact_text` and `parted_at`.
    The model is loaded for this one text; for several, load it yourself and give `RotatedCache` to
    its own `generate`. Raises `RotationZooError` if model, rotations and prompt do not fit
    together.
    """
    if not isinstance(settings.prompt, str):
        kind = type(settings.prompt).__name__
        hint = "for token ids, give the model's own generate a RotatedCache"
        raise UsageError(f"a prompt is a text, and not of type {kind}", hint)
    return run_generation(settings, settings.progress or Bars(), settings.write)
