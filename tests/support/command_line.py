"""What tests of the command line ask of a run: its one error, and the files that it left."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.recipe import PRESETS, Data
from support.models import save_tiny

SMALL = ["--tokens", "2048", "--length", "256"]
TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal's window


def only_error(result, code: int = 1) -> str:
    """The run failed with this code, in one `Error:` line and at most one `Hint:` line; returns
    both."""
    assert result.returncode == code, result.stderr
    lines = without_stages(result.stderr.strip())
    assert lines[0].startswith("Error: "), result.stderr
    assert len(lines) <= 2, result.stderr
    assert all(line.startswith("Hint: ") for line in lines[1:]), result.stderr
    assert result.stdout == ""
    return result.stderr


def without_stages(errors: str) -> list[str]:
    """The lines of stderr without those that a slow run writes of its progress."""
    return [line for line in errors.splitlines() if not line.startswith("[")]


def left_behind(command) -> list[str]:
    """Every path in the folder that the command ran in."""
    return sorted(str(path.relative_to(command.folder)) for path in command.folder.rglob("*"))


SMALL_RECIPE = PRESETS["oscar"].model_copy(
    update={"data": Data(tokens=1024, length=256), "sink": 8, "recent": 16}
)

# Commands that read an artifact, with the rest of their words.
READERS = (
    ("inspect",),
    ("verify",),
    ("report",),
    ("export", "--to", "sglang"),
    ("push", "me/zoo", "--dry-run"),
)


def small_artifact(folder: Path) -> Path:
    """An artifact in `folder / out`, and its model in `folder / tiny`: copies of those that this
    process calibrated once."""
    kept = _calibrate_once()
    for name in ("tiny", "out"):
        shutil.copytree(Path(kept.name) / name, folder / name)
    return folder / "out"


@cache
def _calibrate_once() -> tempfile.TemporaryDirectory:
    kept = tempfile.TemporaryDirectory(prefix="rotationzoo-small-")
    folder = Path(kept.name)
    calibrate(Job(str(save_tiny(folder / "tiny")), SMALL_RECIPE, folder / "out", device="cpu"))
    return kept


def refused(result) -> str:
    """One sentence and no traceback."""
    assert result.returncode in (1, 2), (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert [line[:7] for line in lines if line.startswith("Error: ")] == ["Error: "], result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def all_refuse(inside, folder: Path) -> list[str]:
    """What each command says, in one sentence."""
    return [refused(inside(word, folder, *more)) for word, *more in READERS]


def edit_manifest(folder: Path, **changes) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
