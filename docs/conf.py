"""How Sphinx makes a site of the pages in docs/: `make docs`, then open build/docs/index.html.

The pages are Markdown that GitHub shows as well. What only the site needs is added here while
Sphinx reads them: the table of contents, and the two pages whose text lies in the root of the
repository.
"""

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # autodoc reads the docstrings of this checkout

from rotationzoo import __version__  # noqa: E402

project = "rotationzoo"
author = copyright = "The rotationzoo maintainers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nitpicky = True
# No other project's index is asked over the network, so names from outside stay plain text.
nitpick_ignore_regex = [("py:.*", r"(?!rotationzoo\.).*")]
# Docstrings write code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = f"rotationzoo {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/icon.svg"
html_math_renderer = "mathml"
html_copy_source = False
html_domain_indices = False

CONTENTS = {
    "Start": ["quickstart", "words", "idea", "troubleshooting"],
    "Use": [
        *("cache", "plan", "report", "vllm", "production", "engines", "zoo", "scale", "tasks"),
        "python",
    ],
    "Reference": ["reference/cli", "reference/api", "recipes", "architectures", "codec"],
    "Evidence": ["results", "history", "security"],
    "The project": ["architecture", "contributing", "changelog"],
}
FROM_ROOT = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def add_what_the_site_needs(app: Sphinx, name: str, source: list[str]) -> None:
    """Complete the text of a page, which Sphinx passes as a list of one string."""
    if name in FROM_ROOT:
        text = (ROOT / FROM_ROOT[name]).read_text("utf-8")
        source[0] = _LINK.sub(_from_root, text)
    else:
        source[0] = _LINK.sub(_to_mirror, source[0])
    if name == "index":
        source[0] += "".join(map(_toctree, CONTENTS))


def _from_root(link: re.Match[str]) -> str:
    """The link of a file in the root, as a page in docs/ writes it."""
    target, anchor = link[1], link[2] or ""
    if target.startswith("docs/"):
        target = target.removeprefix("docs/")
    elif (ROOT / target).exists():
        target = f"../{target}"
    return _to_mirror(_LINK.fullmatch(f"]({target}{anchor})") or link)


def _to_mirror(link: re.Match[str]) -> str:
    """A link to a file of the root that is a page of the site leads to that page."""
    for page, file in FROM_ROOT.items():
        if link[1] == f"../{file}":
            return f"]({page}.md{link[2] or ''})"
    return link[0]


def _toctree(caption: str) -> str:
    pages = "\n".join(CONTENTS[caption])
    return f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def help_keyboards(app: Sphinx, page: str, template: str, context: dict[str, Any], _: Any) -> None:
    """Let keys scroll what is wider than a phone, and give the captions in the sidebar, which
    Sphinx makes headings, the level that ARIA wants."""
    for begin in ("<pre", '<div class="table-wrapper', '<div class="formula'):
        tag, _, rest = begin.partition(" ")
        focusable = f'{tag} tabindex="0" {rest}'.rstrip()
        context["body"] = context.get("body", "").replace(begin, focusable)
    levelled = 'role="heading" aria-level="2"'
    navigation = context["furo_navigation_tree"]
    context["furo_navigation_tree"] = navigation.replace('role="heading"', levelled)


def show_inline(writer: HTML5Translator, node: nodes.math) -> None:
    """MathML, which browsers draw by themselves: no script, no font, no image."""
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def show_block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """The same for a formula in lines of its own."""
    writer.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Sphinx calls this first."""
    app.connect("source-read", add_what_the_site_needs)
    app.connect("html-page-context", help_keyboards, priority=900)  # after furo has made it
    app.add_html_math_renderer("mathml", (show_inline, None), (show_block, None))
