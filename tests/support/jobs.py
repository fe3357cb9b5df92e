"""Small calibrations of the tiny model."""

from collections.abc import Callable
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.plan import Job
from rotationzoo.recipe import Data, Recipe
from support.recipes import QUICK

SMALL = Data(tokens=2048, length=256)
RECIPE = Recipe(data=SMALL)


def job(model, folder, recipe=RECIPE, **changes) -> Job:
    """A job on the CPU whose output is `out` in a folder."""
    return Job(
        model=str(model), recipe=recipe, output=Path(folder) / "out", device="cpu", **changes
    )


def calibrate_short(
    model: Path | str, output: Path, recipe: Recipe = QUICK, tokens: int = 2048, device: str = "cpu"
) -> Artifact:
    """An artifact from so many tokens of the recipe's text, in rows of 512."""
    from rotationzoo.calibration.calibrate import calibrate

    data = Data(tokens=tokens, length=512)
    changed = recipe.model_copy(update={"data": data})
    return calibrate(Job(str(model), changed, output, device=device))


def rotation_bytes(artifact: Artifact) -> bytes:
    """The file of rotations, whole."""
    return (artifact.folder / "rotations.safetensors").read_bytes()


def interrupt_after(batches: int) -> Callable[[str, int, int], None]:
    """A progress callback that stops the job after so many batches, as Ctrl-C does."""

    told, whole = -1, 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal told, whole
        if stage == "calibrating":
            whole += done == told  # after its last layer, and once its sums are there
            told = done
        if whole == batches:
            raise KeyboardInterrupt

    return progress
