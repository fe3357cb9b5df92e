"""The house rules that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rotationzoo"
# Floors of docs/architecture.md: a module imports only from lower floors, or from those to its left on its own.
FLOORS = [
    ["errors", "hadamard", "moments", "rotation", "int2", "rope"],
    [
        "tokens",
        "network",
        "files",
        "strict",
        "folders",
        "source",
        "capture",
        "centering",
        "geometry",
        "models",
        "recipe",
        "corpus",
        "manifest",
        "layout",
        "artifact",
        "identity",
        "checkpoint",
        "kernels",
        "index",
        "hubs",
        "engines",
    ],
    [
        "collect",
        "generate",
        "fit",
        "card",
        "foreign",
        "verify",
        "tally",
        "verdict",
        "saved_evaluation",
        "simulate",
        "candidates",
        "projection",
        "sample",
        "refine",
        "trim",
        "choose",
        "search",
        "memory",
        "plan",
        "calibrate",
        "importing",
        "serving",
        "export",
        "absorb",
        "probe",
        "summary",
        "arms",
        "evaluate",
        "validate",
        "report",
        "ownership",
        "publish",
        "lookup",
        "pull",
        "release",
    ],
    [
        "stage_log",
        "console",
        "tables",
        "evaluation_table",
        "plan_view",
        "cli_options",
        "cli_model",
        "cli_zoo",
        "cli_engines",
        "cli",
        "__main__",
    ],
]
ORDER = [module for floor in FLOORS for module in floor]
PURE = {"transformers", "datasets", "accelerate", "huggingface_hub", "safetensors", "typer", "rich", "pathlib", "os"}


def sources(module: str) -> list[Path]:
    """The files of a module, or of a package."""
    return sorted((PACKAGE / module).rglob("*.py")) or [PACKAGE / f"{module}.py"]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "rotationzoo":
            found |= {f"rotationzoo.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_every_module_has_a_floor():
    modules = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert sorted(ORDER) == sorted(modules - {"__init__"})


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_down(module):
    names = (name for path in sources(module) for name in imports(path))
    own = {name.split(".")[1] for name in names if name.startswith("rotationzoo.")} - {module, "__version__"}
    assert not own - set(ORDER[: ORDER.index(module)]), "imports go down only"


@pytest.mark.parametrize("module", FLOORS[0])
def test_the_mathematics_knows_no_files_and_no_models(module):
    assert not PURE & {name.split(".")[0] for name in imports(PACKAGE / f"{module}.py")}


def test_what_people_read_passes_through_one_module():
    """`console.visible` is what keeps escape characters off a terminal; only `console` prints."""
    for path in PACKAGE.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        methods = {f"{ast.unparse(call.value)}.{call.attr}" for call in calls if isinstance(call, ast.Attribute)}
        prints = (names & {"print", "Console"}) | (methods & {"typer.echo", "sys.stdout.write", "sys.stderr.write"})
        assert path.name == "console.py" or not prints, f"{path}: use console.say, or Output.note"


def test_modules_stay_short():
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert max(lengths.values()) <= 300, lengths


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_linter_and_type_checker(command):
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
