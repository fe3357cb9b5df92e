"""What a model card says of its own figures: on what they were measured, and on what not."""

from rotationzoo.artifact.card_results import own_arms
from rotationzoo.artifact.manifest import Manifest
from rotationzoo.artifact.reproduce import name_in_commands
from rotationzoo.artifact.results import EvaluationSummary
from rotationzoo.recipe import Recipe
from rotationzoo.words import counted


def limits_section(manifest: Manifest, recipe: Recipe) -> str:
    """The section on what the rotations are for, and what nobody has measured of them."""
    points = [
        "For the weights of this model and revision alone. A fine-tuned model, or other attention "
        "settings, need rotations of their own."
    ]
    if recipe.needs_statistics and manifest.calibration is not None:
        points.append(
            f"Calibrated on rows of {recipe.data.length:,} tokens; text of another kind, or of "
            "another language, may be read less well."
        )
    if manifest.metrics.evaluation is None:
        model = name_in_commands(manifest.model)
        points.append(
            "What they cost the model has not been measured. To measure it, run: "
            f"`rotationzoo evaluate {model} FOLDER --save`."
        )
    else:
        points += _measured_points(manifest.metrics.evaluation)
    points.append(_kernel_point(manifest))
    if recipe.equalize:
        points.append("Engines need the folded copy of the model: see above.")
    lines = "\n".join(f"* {point}" for point in points)
    return f"## Limits\n\n{lines}\n"


def _measured_points(evaluation: EvaluationSummary) -> list[str]:
    arm = next(iter(own_arms(evaluation).values()), None)
    points = []
    if arm is not None and arm.tasks:
        questions = sum(score.questions for score in arm.tasks.values())
        lengths = " and ".join(f"{length:,}" for length in evaluation.task_lengths)
        long = f" of {lengths} tokens" if lengths else ""
        points.append(
            f"Answers: {counted(questions, 'question')} in prompts{long}. Longer contexts, other "
            "tasks and long answers have not been measured."
        )
        unable = [name for name in evaluation.exact_tasks if name not in arm.tasks]
        if unable:
            points.append(f"The exact model itself cannot do: {', '.join(unable)}.")
    else:
        points.append("No questions about a context have been asked.")
    points.append(
        f"Measured in transformers, with a cache of the format {evaluation.format}. No "
        "engine has been measured, nor its speed."
    )
    return points


def _kernel_point(manifest: Manifest) -> str:
    validation = manifest.metrics.validation
    if validation is None:
        return "The CUDA reference has not been run on these matrices."
    if not validation.on_gpu:
        return (
            "Not validated on a GPU: only the codec's definition was run on these matrices, on a "
            "CPU."
        )
    all_equal = validation.codes_equal and validation.dequantized_equal
    equal = "bit-equal to" if all_equal else "NOT equal to"
    return (
        f"On {validation.device}, `int2.cu` gave codes and values {equal} the definition for "
        f"{validation.rows:,} rows of all layers and heads (`validation.json`)."
    )
