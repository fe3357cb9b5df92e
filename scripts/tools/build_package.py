"""Build the source distribution, and from it the wheel, with the setuptools that is installed.

    python scripts/tools/build_package.py [--tree FOLDER] OUTPUT

`python -m build` does the same in an environment of its own, for which it resolves and downloads
setuptools anew. The release workflow installs the one that is locked by its hash.
"""

import argparse
import contextlib
import tarfile
import tempfile
from pathlib import Path

from setuptools import build_meta


def build_sdist(tree: Path, output: Path) -> Path:
    with contextlib.chdir(tree):
        return output / build_meta.build_sdist(str(output))


def build_wheel(tree: Path, output: Path) -> Path:
    with contextlib.chdir(tree):
        return output / build_meta.build_wheel(str(output))


def build_wheel_of(sdist: Path, output: Path) -> Path:
    """What does not reach the source distribution does not reach the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (tree,) = Path(folder).iterdir()
        return build_wheel(tree, output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--tree", type=Path, default=Path())
    options = parser.parse_args()
    made = options.output.resolve()
    made.mkdir(parents=True, exist_ok=True)
    build_wheel_of(build_sdist(options.tree, made), made)
