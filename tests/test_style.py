"""The house rules that a machine can check: which package may import which, how much a statement
may do, and who prints."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.places import ROOT, recipe_of

PACKAGE = ROOT / "rotationzoo"
# A package or a top-level module imports only from those before it; inside a package, modules
# import without a cycle. docs/architecture.md is written from this order: `make docs`.
ORDER = [
    "errors", "progress", "words", "settings_base", "sides", "budget",
    "storage", "network", "linalg", "rotations", "geometry", "recipe",
    "codec", "artifact", "vllm", "model", "cache", "text", "recall", "settings",
    "simulation", "report", "writer", "calibration", "evaluation", "checks",
    "engines", "zoo", "capacity", "generation", "api", "cli", "__main__",
]  # fmt: skip
# The mathematics knows no files, no models and no other library than torch and scipy.
IMPURE = {
    "transformers", "datasets", "accelerate", "huggingface_hub", "safetensors", "typer", "rich",
    "pathlib", "os",
}  # fmt: skip
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


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


TREES = {path: ast.parse(path.read_text("utf-8")) for path in MODULES.values()}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(TREES[path]):
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
        if path.stem != "cuda":  # which compiles a file
            assert not IMPURE & {name.split(".")[0] for name in imports(path)}, path


def test_what_people_read_passes_through_one_module():
    """`output.visible` is what keeps escape characters off a terminal; only `output` prints."""
    printing = {"print", "Console", "typer.echo", "sys.stdout.write", "sys.stderr.write"}
    for path, tree in TREES.items():
        if path != PACKAGE / "cli" / "output.py":
            calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
            assert not printing & set(map(ast.unparse, calls)), f"{path}: use output.say"


def own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement, without those of the statements inside it."""
    waiting = list(ast.iter_child_nodes(statement))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            yield node
        if not isinstance(node, ast.stmt):
            waiting += ast.iter_child_nodes(node)


def is_dense(node: ast.expr) -> bool:
    return isinstance(node, (*COMPREHENSIONS, ast.IfExp))


def test_a_statement_has_one_comprehension_or_one_conditional_expression():
    crowded = []
    for path, tree in TREES.items():
        for statement in ast.walk(tree):
            if isinstance(statement, ast.stmt):
                dense = sum(map(is_dense, own_expressions(statement)))
                if dense > 1:
                    crowded.append(f"{path.relative_to(ROOT)}:{statement.lineno} has {dense}")
    report = "\n".join(sorted(crowded))
    assert not crowded, f"name an intermediate result in these:\n{report}"


# `owner.name` in a docstring or a comment, and the endings of files, which look like it.
MENTION = re.compile(r"`(?:\w+\.)*(\w+)\.(\w+)(?:\(\))?`")
ENDINGS = {"cu", "json", "jinja", "safetensors", "sig", "py", "pt", "txt"}


def test_names_in_backticks_exist():
    """A name of a module, class or package of ours that docstrings, comments and kernels mention
    stands in its file. Names of other libraries are not resolved."""
    texts = {path: path.read_text("utf-8") for path in PACKAGE.rglob("*.[pc][yu]")}
    bare = {path: re.sub(r"`[^`\n]*`", "", text) for path, text in texts.items()}
    owned = {path: set(re.findall(r"\w+", text)) for path, text in bare.items()}
    places = dict[str, list[Path]]()
    for path, text in bare.items():
        names = {path.stem, *re.findall(r"^class (\w+)", text, re.MULTILINE)}
        for name in names | set(path.relative_to(PACKAGE).parts[:-1]):
            places.setdefault(name, []).append(path)
    gone = []
    for path, text in texts.items():
        for owner, name in MENTION.findall(text):
            files = places.get(owner, [])
            known = any(name in owned[file] or name == file.stem for file in files)
            known |= f"{owner}.{name}" in bare[path] or name in ENDINGS
            if files and not known:
                gone.append(f"{path.relative_to(ROOT)} mentions {owner}.{name}")
    assert not gone, "\n".join(gone)


@pytest.mark.thorough
@pytest.mark.parametrize("command", recipe_of("lint"))
def test_linter_and_type_checker(command):
    program, *words = command.split()  # in the environment of a fresh clone
    program = Path(sys.executable).with_name(Path(program).name)
    result = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
