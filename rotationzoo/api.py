"""The public functions: `from rotationzoo import calibrate, evaluate, pull`.

They take plain values, and return the artifact or the report that the command line shows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate as run_calibration
from rotationzoo.calibration.plan import Job
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.job import Evaluation
from rotationzoo.evaluation.job import evaluate as run_evaluation
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import PRESETS, Recipe, load, override
from rotationzoo.zoo.hubs.registry import HUB_NAMES
from rotationzoo.zoo.lookup import choose_entry, find_index
from rotationzoo.zoo.pull import pull_first


class Text(TypedDict, total=False):
    """The text that a model reads; what is left out is the recipe's."""

    data: str
    """A data set id, a `.jsonl`, `.txt` or `.parquet` file, `bundled`, or `self`: text that the
    model writes itself."""
    tokens: int
    """Tokens in all."""
    length: int
    """Tokens a row."""
    seed: int
    """Order of the documents."""
    subset: str
    split: str
    column: str
    packing: str
    prompts: str


class Run(TypedDict, total=False):
    """How a model is loaded and run."""

    revision: str
    batch: int
    """Rows a forward pass."""
    device: str
    """`auto`, `cpu` or `cuda`."""
    dtype: str
    """`auto`, `bfloat16` or `float32`."""
    device_map: str
    max_memory: str


class CalibrationOptions(Text, Run, total=False):
    """What else `calibrate` takes."""

    budget: float
    """Minutes for the search of recipes such as `best`."""
    restart: bool
    """Drop a checkpoint and replace an artifact."""
    progress: Progress
    """Told of each stage as `(stage, done, total)`."""


class EvaluationOptions(Text, Run, total=False):
    """What else `evaluate` takes."""

    windows: list[tuple[int, int]]
    """Pairs of sink and recent tokens that stay exact; the recipe's where left out."""
    format: str
    """The engine's 2-bit format, such as `sglang` or `mlx`."""
    layers: set[int]
    """Only these layers in 2 bits."""
    sides: tuple[str, ...]
    """`("key",)` or `("value",)` leaves the other side exact."""
    prefill_chunk: int
    prefill_layout: Literal["server", "window"]
    queries: int
    """Sampled queries a text for the attention KL; 0 leaves it out."""
    progress: Progress


_TEXT = Text.__optional_keys__
_ON_DISK = str | Path | Artifact


def calibrate(
    model: str,
    *,
    output: str | Path,
    recipe: str | Recipe = "oscar",
    **options: Unpack[CalibrationOptions],
) -> Artifact:
    """Compute the rotations of a model and write them to an artifact folder.

    * `model`: a hub id, a local folder, or `demo`, a small model that comes with this package;
    * `output`: the artifact folder. An artifact of the same job that is there is returned as it is,
      and a run that was stopped goes on from its checkpoint;
    * `recipe`: a name such as `oscar` or `best`, a YAML file, or a `Recipe`;
    * `options`: see `CalibrationOptions`.

    Raises `RotationZooError` for a model or recipe that cannot be calibrated, before the weights
    are read wherever the config can tell.
    """
    loaded = load(recipe) if isinstance(recipe, str) else recipe
    chosen = override(loaded, **_data_settings(options))
    if "budget" in options and chosen.search is None:
        raise UsageError(
            f"budget is for recipes that search, and {chosen.name} does not", hint='recipe="best"'
        )
    settings = {key: value for key, value in options.items() if key not in _TEXT}
    progress: Any = settings.pop("progress", silent)
    # The length of a preset is nobody's wish: rows are cut to what the model has positions for.
    fit_length = "length" not in options and isinstance(recipe, str) and recipe in PRESETS
    output = Path(output).expanduser()
    job: Any = {"batch": 16 if "device_map" in options else 4, **settings}
    return run_calibration(Job(model, chosen, output, fit_length=fit_length, **job), progress)


def evaluate(
    model: str,
    artifacts: _ON_DISK | Sequence[_ON_DISK] = (),
    *,
    save: bool = False,
    **options: Unpack[EvaluationOptions],
) -> dict[str, Any]:
    """Measure what rotations cost a model whose cache is stored in 2 bits.

    * `model`: a hub id, a local folder, or `demo`;
    * `artifacts`: an artifact or its folder, or several; beside them are measured no rotation,
      Hadamard and a random rotation;
    * `save`: add the report to each artifact;
    * `options`: see `EvaluationOptions`. By default 16,384 tokens of held-out text are read in rows
      of 2,048.

    Returns the report, as `rotationzoo evaluate --json` prints it: `exact` is the exact model's
    perplexity, `arms` has `perplexity_increase`, `attention_kl` and `output_error` of each
    rotation. Raises `RotationZooError` for what does not fit together.
    """
    several = [artifacts] if isinstance(artifacts, str | Path | Artifact) else artifacts
    folders = [_folder_of(artifact) for artifact in several]
    text = {"tokens": 16384, "length": 2048, **_data_settings(options)}
    data = override(load("oscar"), **text).data
    settings: Any = {key: value for key, value in options.items() if key not in _TEXT}
    progress: Any = settings.pop("progress", silent)
    save_to = folders if save else []
    return run_evaluation(Evaluation(model, folders, data, save_to=save_to, **settings), progress)


def pull(
    model: str,
    *,
    recipe: str | None = None,
    revision: str | None = None,
    repo: str | None = None,
    hub: str = "any",
    folder: str | Path | None = None,
) -> Artifact:
    """Fetch rotations that somebody published, with every hash checked.

    * `model`: the model whose rotations to fetch, as `Qwen/Qwen3-8B`;
    * `recipe`: only rotations of this recipe;
    * `revision`: the model's revision that they should be made for; the newest otherwise;
    * `repo`: the repository of a zoo, as `owner/name`; that of this project otherwise;
    * `hub`: the hub to fetch from, such as `huggingface`; any of them otherwise;
    * `folder`: where to put them; the cache of huggingface_hub otherwise.

    Raises `RotationZooError` where there are none, and for files that are not what the index lists.
    """
    hubs: list[str] = list(HUB_NAMES) if hub == "any" else [hub]
    index = find_index(None, repo, hubs[0])
    entry, copies, _ = choose_entry(index, model, revision, recipe, hubs)
    pulled = pull_first(index, entry, copies, None if folder is None else Path(folder))
    if pulled.artifact is None:
        raise RotationZooError(
            f"the rotations of {entry.model} in {pulled.copy.repo} are no artifact: {pulled.path}",
            hint=f"make one of them: rotationzoo import {pulled.path} --model {entry.model}",
        )
    return pulled.artifact


def _folder_of(artifact: _ON_DISK) -> Path:
    return artifact.folder if isinstance(artifact, Artifact) else Path(artifact).expanduser()


def _data_settings(options: CalibrationOptions | EvaluationOptions) -> dict[str, Any]:
    """Settings of a recipe's `data`, where the text is called `source`."""
    settings: dict[str, Any] = {key: value for key, value in options.items() if key in _TEXT}
    if "data" in settings:
        settings["source"] = settings.pop("data")
    return settings
