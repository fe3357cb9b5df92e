"""Write .github/requirements*.txt again from pyproject.toml: what the workflows install, with the
sha256 of every file. A name chooses one of the two files.

    python scripts/tools/lock_requirements.py [requirements-dev.txt]
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github"
LOCKS = {"requirements.txt": ("cuda", "report", "sign"), "requirements-dev.txt": ("dev",)}
"""Name -> the extras that it holds beside what the package needs."""
PLATFORM = ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"]
PLATFORM += [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28)]
PLATFORM += ["--platform=manylinux2014_x86_64", "--platform=linux_x86_64"]
HEADER = """\
# Made by scripts/tools/lock_requirements.py for CPython 3.12 on Linux x86-64, which is what the
# workflows run on. torch is PyPI's, built for CUDA, with CUDA's libraries: one lock for the runner
# with a GPU and for those without.
"""


def main() -> None:
    for name in sys.argv[1:] or LOCKS:
        write_lock(name)


def write_lock(name: str) -> None:
    """Resolve what a lock holds, and replace it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], "setuptools>=77"]
    for chosen in LOCKS[name]:
        wanted += [line.split(";")[0] for line in extras[chosen]]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--isolated", "--dry-run"]
        command += ["--ignore-installed", "--quiet", "--index-url", "https://pypi.org/simple"]
        command += ["--only-binary", ":all:", "--report", str(report)]
        command += ["--target", folder, *PLATFORM, *wanted]
        settings = {
            name: value for name, value in os.environ.items() if not name.startswith("PIP_")
        }
        subprocess.run(command, check=True, env={**settings, "PIP_CONFIG_FILE": os.devnull})
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    lines = []
    # In the order of names, so that a change of the lock shows what was updated.
    for item in sorted(chosen, key=lambda item: item["metadata"]["name"].lower()):
        package, version = item["metadata"]["name"], item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{package.lower().replace('_', '-')}=={version} --hash=sha256:{digest}\n")
    (FOLDER / name).write_text(HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
