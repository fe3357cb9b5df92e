"""Check that a tag is the version of the package, and that the changelog has it with a date.

python scripts/tools/check_release.py v0.1.0
"""

import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^## \[(\S+)\] - (\S+)$", re.MULTILINE)


def release_problem(tag: str, version: str, changelog: str) -> str | None:
    """What is wrong with releasing this version under this tag, or None."""
    if tag != f"v{version}":
        return f"the tag is {tag}, and rotationzoo.__version__ is {version}"
    dates = dict(HEADING.findall(changelog))
    if version not in dates:
        return f"CHANGELOG.md has no heading for {version}"
    try:
        date.fromisoformat(dates[version])
    except ValueError:
        return f"CHANGELOG.md has {version} as {dates[version]!r}, and not with a date"
    if version != next(iter(dates)):
        return f"{version} is not the newest version in CHANGELOG.md"
    return None


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from rotationzoo import __version__

    sys.exit(release_problem(sys.argv[1], __version__, (ROOT / "CHANGELOG.md").read_text("utf-8")))
