"""The packages in the order that is enforced, written into docs/architecture.md.

python scripts/tools/write_architecture.py

The order is `ORDER` of tests/test_style.py, and the words are the first sentences of docstrings.
tests/test_architecture.py fails if the page is outdated.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rotationzoo"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- written by scripts/tools/write_architecture.py -->\n"
END = "<!-- end of the list -->\n"


def order() -> list[str]:
    """Packages and top-level modules, each of which imports only from those before it."""
    text = (ROOT / "tests" / "test_style.py").read_text(encoding="utf-8")
    names: list[str] = ast.literal_eval(text.split("\nORDER = ")[1].split("]")[0] + "]")
    return names


def first_sentence(path: Path) -> str:
    """Of a module's docstring; empty if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s", paragraph)[0].removesuffix(".")


def rooms() -> list[tuple[str, Path]]:
    """Every package and module in the order that is enforced, with the file of its docstring.

    A package comes as `name/`, before its modules as `name/module`.
    """
    listed = []
    for name in order():
        folder = PACKAGE / name
        paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
        for path in paths:
            room = path.relative_to(PACKAGE).with_suffix("").as_posix()
            listed.append((room.removesuffix("__init__"), path))
    return listed


def listing() -> str:
    """Markdown: a line for each package and top-level module."""
    tops = [(name, path) for name, path in rooms() if "/" not in name.rstrip("/")]
    return "".join(f"* `{name}`: {first_sentence(path)}\n" for name, path in tops)


def page(text: str) -> str:
    """The page with the current list."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{listing()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
