"""What the tests of this package evaluate."""

import shutil
from pathlib import Path

import pytest
from support.recipes import CODED
from support.reports import short_probes

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.recipe import Data
from rotationzoo.recipe.loading import PRESETS


@pytest.fixture(autouse=True, scope="module")
def one_short_prompt():
    """For the fixtures of a module too."""
    with short_probes():
        yield


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory) -> list[Path]:
    """The demo model's artifacts of `attention` and `oscar-v1`, in folders of these names."""
    folder = tmp_path_factory.mktemp("artifacts")
    data = Data(tokens=1024, length=256)
    folders = []
    for name in ("attention", "oscar-v1"):
        recipe = PRESETS[name].model_copy(update={"data": data})
        folders.append(calibrate(Job("demo", recipe, folder / name)).folder)
    return folders


@pytest.fixture(scope="session")
def of_induction(induction, tmp_path_factory) -> Path:
    """An artifact of the model `induction`, which no test may change."""
    changes = {"data": Data(tokens=1024, length=512), "sink": 16, "recent": 64}
    recipe = CODED.model_copy(update=changes)
    folder = tmp_path_factory.mktemp("made") / "mine"
    return calibrate(Job(str(induction), recipe, folder, device="cpu")).folder


@pytest.fixture(scope="module")
def mine(of_induction, tmp_path_factory) -> Path:
    """A copy of it, which the tests of a module may save evaluations in."""
    return Path(shutil.copytree(of_induction, tmp_path_factory.mktemp("copy") / "mine"))
