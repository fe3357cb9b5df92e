"""Where the repository is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


TEXT = (ROOT / "Makefile").read_text("utf-8")


def recipe_of(target: str) -> list[str]:
    """The commands of a target, with the virtual environment of a fresh clone."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", TEXT, re.MULTILINE)
    assert recipe, f"the Makefile has no target {target}"
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
