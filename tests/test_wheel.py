"""What `pip install rotationzoo` brings: the distributions hold the package and nothing else, and
the wheel works in an environment that does not know this repository."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.places import ROOT

from rotationzoo import Artifact, __version__
from rotationzoo.checks.verify import verify

pytestmark = pytest.mark.thorough

NAME = f"rotationzoo-{__version__}"
NEEDED = {
    "py.typed",
    "codec/kernels/attention.cu",
    "codec/kernels/int2.cu",
    "data/demo/NOTICE",
    "data/demo/calibration.jsonl",
    "data/demo/model/model.safetensors",
    "data/zoo_index.json",
    "report/page.css",
    "report/templates/report.html.jinja",
    "report/templates/section.html.jinja",
}
# How the files of a distribution are named by setuptools, besides those of the package.
ADDED = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
TOP_LEVEL = {
    "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"
}  # fmt: skip


def run(*words, **options) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def split_names(names: Iterable[str]) -> tuple[set[str], set[str]]:
    """The files of the package, below its folder, and the others."""
    inside = {name for name in names if name.startswith("rotationzoo/")}
    return {name.removeprefix("rotationzoo/") for name in inside}, set(names) - inside


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both distributions of a clean copy of the tree, and a wheel that was made from the tree
    itself."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    for name in ("rotationzoo", "scripts", "tests", "docs", ".github"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith(".coverage"):
            shutil.copy(path, tree)
    package = files_below(tree / "rotationzoo")
    # Every file of an archive has the same time.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    words = f"from setuptools import build_meta; build_meta.build_sdist({str(folder / 'dist')!r})"
    run(sys.executable, "-c", words, cwd=tree, env=environment)
    (sdist,) = (folder / "dist").iterdir()
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    for source, place in {sdist: folder / "dist", tree: folder}.items():
        run(*pip, "--wheel-dir", place, source, env=environment)
    (direct_wheel,), (wheel,) = folder.glob("*.whl"), (folder / "dist").glob("*.whl")
    return SimpleNamespace(package=package, wheel=wheel, sdist=sdist, direct=direct_wheel)


def test_the_wheel_holds_the_package_and_nothing_else(built):
    assert built.wheel.name == f"{NAME}-py3-none-any.whl"
    inside, others = split_names(contents(built.wheel))
    assert inside == built.package
    assert inside >= NEEDED
    assert others == {f"{NAME}.dist-info/{name}" for name in ADDED}


def test_the_source_distribution_makes_the_same_wheel_and_has_no_tests(built):
    assert built.sdist.name == f"{NAME}.tar.gz"
    with tarfile.open(built.sdist) as archive:
        members = [member.name for member in archive.getmembers() if not member.isdir()]
    inside, others = split_names([name.removeprefix(f"{NAME}/") for name in members])
    assert inside == built.package
    assert {name for name in others if not name.startswith("rotationzoo.egg-info/")} == TOP_LEVEL
    assert contents(built.wheel) == contents(built.direct)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """An environment with the wheel, which has the dependencies of this one and not the checkout.
    An editable installation is not read from a folder that a .pth file names."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    pip = [sys.executable, "-m", "pip", "--python", folder / "env", "install", "--no-index"]
    run(*pip, "--no-deps", "--no-compile", "--quiet", built.wheel, env=clean())
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    folders = [path for path in map(Path, sys.path) if path.is_dir()]
    known = [path for path in folders if "site-packages" in path.parts or not is_checkout(path)]
    (packages / "dependencies.pth").write_text("\n".join(map(str, known)))
    (folder / "work").mkdir()
    return SimpleNamespace(bin=folder / "env" / "bin", work=folder / "work", packages=packages)


def is_checkout(path: Path) -> bool:
    return path.resolve() == ROOT or ROOT in path.resolve().parents


def clean() -> dict[str, str]:
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS")
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    return variables | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


# One process, because importing torch and transformers takes seconds.
PROGRAM = """
import torch, rotationzoo
from rotationzoo.cli.app import main
from rotationzoo.codec import kernels
assert "__global__" in kernels.read("int2.cu")
print(rotationzoo.__file__)
main("calibrate demo --tokens 1024 --length 512 --quiet".split())
"""


def test_an_installed_wheel_calibrates_the_demo_model_and_finds_the_kernels(installed):
    options = {"cwd": installed.work, "env": clean()}
    command = [installed.bin / "rotationzoo", "list", "--index", "bundled", "--json"]
    assert json.loads(run(*command, **options))["entries"]
    shown = run(installed.bin / "python", "-c", PROGRAM, **options)
    file, artifact = shown.splitlines()
    assert Path(file).parent == installed.packages / "rotationzoo"
    assert verify(Artifact.open(installed.work / artifact)).ok
