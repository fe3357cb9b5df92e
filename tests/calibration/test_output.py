"""What is in the place of the output, and what happens to it."""

import shutil
from pathlib import Path

import pytest
from support.jobs import RECIPE, job

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import override
from rotationzoo.writer import write_artifact


def test_another_recipes_work_is_kept_until_restart(tiny, tmp_path):
    first = calibrate(job(tiny, tmp_path))
    other = override(RECIPE, seed=2)
    with pytest.raises(RotationZooError, match="holds the work of another recipe"):
        calibrate(job(tiny, tmp_path, other))
    assert verify(first).ok
    assert calibrate(job(tiny, tmp_path, other, restart=True)).identity != first.identity


def test_a_folder_of_something_else_is_never_replaced(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("...")
    for restart in (False, True):
        with pytest.raises(RotationZooError, match="is no artifact"):
            calibrate(job(tiny, tmp_path, restart=restart))
    (tmp_path / "out" / "manifest.json").write_text('{"name": "a browser extension"}')
    with pytest.raises(RotationZooError, match="damaged"):
        calibrate(job(tiny, tmp_path, restart=True))
    assert (tmp_path / "out" / "thesis.tex").exists()
    artifact = calibrate(job(tiny, tmp_path / "other"))
    (artifact.folder / "notes.md").write_text("mine")
    with pytest.raises(RotationZooError, match=r"also holds notes\.md"):
        calibrate(job(tiny, tmp_path / "other", restart=True))


def test_an_artifact_that_cannot_be_replaced_is_put_back(calibrated, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(calibrated.folder, tmp_path / "out"))
    rename = Path.rename

    def fail(self, target):
        if self.name == ".out.partial":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RotationZooError, match="cannot be written: No space left"):
        write_artifact(folder, calibrated.rotations, None, calibrated.content)
    monkeypatch.undo()
    assert verify(Artifact.open(folder)).ok
    folder.rename(tmp_path / ".out.old")  # as a kill between the two renames leaves it
    assert verify(Artifact.open(folder)).ok
