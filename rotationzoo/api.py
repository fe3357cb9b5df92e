"""The public functions `calibrate` and `evaluate`.

They take plain values and return the artifact or the report that the command line shows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from rotationzoo.api_options import CalibrationOptions, EvaluationOptions, Text
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate as run_calibration
from rotationzoo.calibration.memory import SIZED
from rotationzoo.calibration.plan import Job
from rotationzoo.evaluation.job import Evaluation
from rotationzoo.evaluation.job import evaluate as run_evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.progress import silent
from rotationzoo.recipe import (
    PRESETS,
    Recipe,
    load,
    override,
    with_feedback,
    with_rope_scaling,
)
from rotationzoo.runtime.through_cache import ThroughCache

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

    * `model`: a hub id, a local folder, or `demo`, a small model that ships with this package;
    * `output`: the artifact folder. If it already holds the artifact of this job, that artifact is
      returned unchanged. A run that was stopped resumes from its checkpoint;
    * `recipe`: a name such as `oscar`, a YAML file, or a `Recipe`;
    * `options`: see `CalibrationOptions`.

    Raises `RotationZooError` for a model or recipe that cannot be calibrated. Where the config is
    enough to tell, it does so before the weights are read.
    """
    loaded = load(recipe) if isinstance(recipe, str) else recipe
    chosen = override(loaded, **_data_settings(options))
    if "feedback" in options:
        chosen = with_feedback(chosen, options["feedback"])
    if "rope_scaling" in options:
        chosen = with_rope_scaling(chosen, options["rope_scaling"])
    settings = {key: value for key, value in options.items() if key not in _TEXT}
    for of_recipe in ("feedback", "rope_scaling"):
        settings.pop(of_recipe, None)
    progress: Any = settings.pop("progress", silent)
    # The user did not choose a preset's row length, so rows may be shortened to the model's
    # positions.
    fit_length = "length" not in options and isinstance(recipe, str) and recipe in PRESETS
    output = Path(output).expanduser()
    # A model that is spread over devices may be read from disk for every batch, so larger batches
    # are faster.
    job: Any = {"batch": SIZED if options.get("device_map") else 4, **settings}
    return run_calibration(Job(model, chosen, output, fit_length=fit_length, **job), progress)


def evaluate(
    model: str,
    artifacts: _ON_DISK | Sequence[_ON_DISK] = (),
    *,
    save: bool = False,
    **options: Unpack[EvaluationOptions],
) -> dict[str, Any]:
    """Measure what a 2-bit cache costs a model, for each of several rotations.

    * `model`: a hub id, a local folder, or `demo`;
    * `artifacts`: an artifact, its folder, or several of either. The baselines measured with them
      are no rotation (`identity`), `hadamard`, a `random` rotation, and `kivi`;
    * `save`: add the report to each artifact;
    * `options`: see `EvaluationOptions`. The default is to read 16,384 tokens of held-out text in
      rows of 2,048, of more where the windows leave nothing of these, and of no more than the model
      has positions.

    Returns the report that `rotationzoo evaluate --json` prints. `exact` is the exact model's
    perplexity and answers; `arms` holds `tasks`, `perplexity_increase`, `attention_kl` and
    `output_error` of each rotation. Raises `RotationZooError` where the model, the artifacts and
    the options do not fit together.
    """
    several = [artifacts] if isinstance(artifacts, str | Path | Artifact) else artifacts
    folders = [_folder_of(artifact) for artifact in several]
    text = {"tokens": 16384, "length": 2048, **_data_settings(options)}
    data = override(load("oscar"), **text).data
    settings: Any = {key: value for key, value in options.items() if key not in _TEXT}
    progress: Any = settings.pop("progress", silent)
    save_to = folders if save else []
    settings["fit_length"] = "length" not in options
    settings["tasks"] = _task_settings(settings)
    job = Evaluation(model, folders, data, save_to=save_to, **settings)
    return run_evaluation(job, progress, ThroughCache).report()


def _folder_of(artifact: _ON_DISK) -> Path:
    return artifact.folder if isinstance(artifact, Artifact) else Path(artifact).expanduser()


def _data_settings(options: CalibrationOptions | EvaluationOptions) -> dict[str, Any]:
    """The options that belong to a recipe's `data`, where the option `data` is called `source`."""
    settings: dict[str, Any] = {key: value for key, value in options.items() if key in _TEXT}
    if "data" in settings:
        settings["source"] = settings.pop("data")
    return settings


def _task_settings(settings: dict[str, Any]) -> TaskSettings:
    """The recall tasks among the settings of an evaluation, which lose them."""
    chosen: dict[str, Any] = {}
    for option, field in (("tasks", "names"), ("lengths", "lengths")):
        if option in settings:
            chosen[field] = tuple(settings.pop(option))
    if "questions" in settings:
        chosen["questions"] = settings.pop("questions")
    return TaskSettings(**chosen)
