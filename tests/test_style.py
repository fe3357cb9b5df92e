"""The house rules that a machine can check: which package may import which, how long a module may
be, who prints."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import ROOT

PACKAGE = ROOT / "rotationzoo"
# A package or a top-level module imports only from those before it; inside a package, modules
# import without a cycle. docs/architecture.md has the same order, in words.
ORDER = [
    "errors",
    "progress",
    "storage",
    "network",
    "linalg",
    "codec",
    "rotations",
    "recipe",
    "model",
    "text",
    "cache",
    "artifact",
    "calibration",
    "evaluation",
    "checks",
    "engines",
    "zoo",
    "api",
    "cli",
    "__main__",
]
# The mathematics knows no files, no models and no other library than torch and scipy.
IMPURE = {
    "transformers",
    "datasets",
    "accelerate",
    "huggingface_hub",
    "safetensors",
    "typer",
    "rich",
    "pathlib",
    "os",
}
LONGEST, MEDIAN = 250, 110  # lines of a module


def sources(room: str) -> list[Path]:
    """The files of a package, or of a top-level module."""
    return sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for path in PACKAGE.rglob("*.py")
    if "data" not in path.relative_to(PACKAGE).parts
}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module or "" for name in whole}
    return names


def room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_every_package_has_its_place():
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES.values()}
    assert sorted(ORDER) == sorted(rooms - {"__init__"})


@pytest.mark.parametrize("room", ORDER)
def test_imports_go_down(room):
    names = {name for path in sources(room) for name in imports(path)}
    used = {room_of(name) for name in names if name.startswith("rotationzoo.")} - {room}
    assert not used - set(ORDER[: ORDER.index(room)]), "a package imports only from those before it"


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: imports(path) & MODULES.keys() for name, path in MODULES.items()}
    del graph["rotationzoo"]  # its public names are imported when they are asked for
    while leaves := [name for name, below in graph.items() if not below & graph.keys() - {name}]:
        for name in leaves:
            del graph[name]
    assert not graph, f"a cycle among {sorted(graph)}"


@pytest.mark.parametrize("room", ["linalg", "codec"])
def test_the_mathematics_knows_no_files_and_no_models(room):
    for path in sources(room):
        if path.stem not in ("cuda", "throughput"):  # which compile a file
            assert not IMPURE & {name.split(".")[0] for name in imports(path)}, path


def test_what_people_read_passes_through_one_module():
    """`output.visible` is what keeps escape characters off a terminal; only `output` prints."""
    for path in MODULES.values():
        calls = [
            node.func
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Call)
        ]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        methods = {
            f"{ast.unparse(call.value)}.{call.attr}"
            for call in calls
            if isinstance(call, ast.Attribute)
        }
        prints = (names & {"print", "Console"}) | (
            methods & {"typer.echo", "sys.stdout.write", "sys.stderr.write"}
        )
        assert path == PACKAGE / "cli" / "output.py" or not prints, (
            f"{path}: use output.say, or Output.note"
        )


def test_modules_stay_short():
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()
    }
    assert not {name: length for name, length in lengths.items() if length > LONGEST}
    written = sorted(length for length in lengths.values() if length)
    assert written[len(written) // 2] <= MEDIAN, "half of the modules are longer"


@pytest.mark.parametrize(
    "command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join
)
def test_linter_and_type_checker(command):
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
