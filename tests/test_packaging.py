"""What is claimed of versions and commands in more than one place is the same in each."""

import re
import shlex
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from support.places import ROOT

TESTED = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text("utf-8"))["jobs"]["tests"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
# What CI installs with the package; `cuda` needs a GPU.
EXTRAS = "docs", "engines", "report", "sign"
# Name -> the extras that it holds beside what the package needs.
LOCKS = {"requirements.txt": ("cuda", "report", "sign"), "requirements-dev.txt": ("dev",)}


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
    """Every requirement in a version that it allows, with a hash. `make lock` makes it anew."""
    lock = (ROOT / ".github" / name).read_text()
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
    for name in ("cuda", "engines", "media", "report", "sign"):
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


def test_the_changelog_begins_with_the_version_of_the_package():
    from rotationzoo import __version__

    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## \[(\S+)\] - ", changelog, re.MULTILINE)[0] == __version__
