"""Small calibrations of the tiny model."""

from collections.abc import Callable
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.plan import Job
from rotationzoo.recipe import Data, Recipe

SMALL = Data(tokens=2048, length=256)
RECIPE = Recipe(data=SMALL)


def job(model, folder, recipe=RECIPE, **changes) -> Job:
    """A job on the CPU whose output is `out` in a folder."""
    return Job(
        model=str(model), recipe=recipe, output=Path(folder) / "out", device="cpu", **changes
    )


def rotation_bytes(artifact: Artifact) -> bytes:
    """The file of rotations, whole."""
    return (artifact.folder / "rotations.safetensors").read_bytes()


def interrupt_after(batches: int) -> Callable[[str, int, int], None]:
    """A progress callback that stops the job after so many batches, as Ctrl-C does."""

    told = 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal told
        told += stage == "calibrating"
        if told == 1 + batches:  # the first is told before any batch
            raise KeyboardInterrupt

    return progress
