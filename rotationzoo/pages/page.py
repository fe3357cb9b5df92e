"""Renders a template into one self-contained HTML file, with its style and its scripts inside."""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_FOLDER = Path(__file__).parent


def render_page(
    template: str,
    scripts: tuple[str, ...] = ("page.js",),
    folders: tuple[Path, ...] = (),
    **values: Any,
) -> str:
    """The HTML of a template in `pages/templates`, or in one of the `folders`, which extends
    `base.html.jinja`.

    Every value is escaped, unless it is `Markup`. `scripts` are files of this package. The page's
    own policy allows a browser to run these and nothing else, and to load nothing at all, so a
    name that slipped through unescaped could still do nothing.
    """
    sources = [_read(name) for name in scripts]
    hashes = " ".join(map(_policy_hash, sources))
    return (
        _environment(*folders)
        .get_template(template)
        .render(
            style=Markup(_read("page.css")),
            scripts=[Markup(source) for source in sources],
            script_policy=Markup(hashes or "'none'"),
            **values,
        )
    )


@cache
def _environment(*folders: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader([*folders, _FOLDER / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _policy_hash(script: str) -> str:
    """A script's hash, as a content security policy writes it."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
