"""What is claimed of versions and commands in more than one place is the same in each, and a
release has the version that its tag names. zoo/test_workflows.py has what it publishes."""

import re
import shlex
import tomllib

import pytest
import yaml
from check_release import release_problem
from lock_requirements import FOLDER, LOCKS
from packaging.requirements import Requirement
from packaging.version import Version
from support.places import ROOT

TESTED = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))["jobs"]["tests"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
# What CI installs with the package; `cuda` needs a GPU.
EXTRAS = "docs", "engines", "report", "sign"


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = [line for name in EXTRAS for line in project["optional-dependencies"][name]]
    return [Requirement(line) for line in (*project["dependencies"], *extras)]


def lowest(requirement: Requirement) -> str:
    (bound,) = (part.version for part in requirement.specifier if part.operator == ">=")
    return bound


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_oldest_dependencies_are_the_lowest_that_are_allowed():
    oldest = pinned("constraints-oldest.txt")
    assert oldest.keys() == {requirement.name for requirement in requirements()}
    for requirement in requirements():
        version = Version(oldest[requirement.name])
        assert version in requirement.specifier
        assert version == Version(lowest(requirement)), f"{requirement} allows an older one"


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_holds_what_the_package_needs(name):
    """Every requirement in a version that it allows, with a hash.
    scripts/tools/lock_requirements.py makes it anew."""
    lock = (FOLDER / name).read_text()
    rows = [line.split() for line in lock.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for _, digest in rows)
    locked = dict(pinned.split("==") for pinned, _ in rows)
    extras = PYPROJECT["project"]["optional-dependencies"]
    extra = [line for chosen in LOCKS[name] for line in extras[chosen]]
    for wanted in map(Requirement, [*PYPROJECT["project"]["dependencies"], *extra]):
        package = wanted.name.lower().replace("_", "-")
        assert wanted.specifier.contains(locked[package]), f"{package} {locked[package]}"


def test_the_commands_that_are_printed_install_what_the_extras_have():
    """Not `rotationzoo[EXTRA]`: only who has a clone has the package, and only in its folder does
    `.[EXTRA]` name it. Requirements are installed from anywhere."""
    printed: set[str] = set()
    for path in sorted((ROOT / "rotationzoo").rglob("*.py")):
        text = path.read_text("utf-8")
        assert "rotationzoo[" not in text, path
        for command in re.findall(r"pip install((?: '[\w.\[\]<>=,-]+')+)", text):
            printed |= {str(Requirement(words)) for words in shlex.split(command)}
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = set()
    for name in ("cuda", "engines", "lora", "media", "report", "sign"):
        wanted |= {str(Requirement(line.partition(";")[0])) for line in extras[name]}
    assert printed == wanted
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert not [page for page in pages if "rotationzoo[" in page.read_text("utf-8")]


def test_the_pythons_that_are_claimed_are_tested():
    rows = TESTED["strategy"]["matrix"]["include"]
    named = "Programming Language :: Python :: 3."
    classifiers = PYPROJECT["project"]["classifiers"]
    claimed = {line.rsplit(" ", 1)[1] for line in classifiers if line.startswith(named)}
    assert {row["python"] for row in rows} == claimed
    assert PYPROJECT["project"]["requires-python"] == f">={min(claimed, key=Version)}"


CHANGELOG = "# Changelog\n\n## [0.2.0] - 2026-11-30\n\n### Added\n\n## [0.1.0] - DAY\n"


@pytest.mark.parametrize(
    ("tag", "version", "day", "problem"),
    [
        ("v0.2.0", "0.2.0", "unreleased", "None"),
        ("v0.2.1", "0.2.0", "unreleased", "the tag is v0.2.1"),
        ("0.2.0", "0.2.0", "unreleased", "the tag is 0.2.0"),
        ("v0.3.0", "0.3.0", "unreleased", "no heading for 0.3.0"),
        ("v0.1.0", "0.1.0", "unreleased", "as 'unreleased', and not with a date"),
        ("v0.1.0", "0.1.0", "2026-10-01", "not the newest"),
    ],
)
def test_only_the_newest_version_with_a_date_is_released(tag, version, day, problem):
    assert problem in str(release_problem(tag, version, CHANGELOG.replace("DAY", day)))


def test_the_changelog_begins_with_the_version_of_the_package():
    from rotationzoo import __version__

    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    problem = release_problem(f"v{__version__}", __version__, changelog)
    assert problem is None or "not with a date" in problem
