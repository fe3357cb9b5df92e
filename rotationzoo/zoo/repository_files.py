"""The files at the root of a zoo repository: the index, the card, and the file that makes Hugging
Face count downloads."""

from rotationzoo.zoo import index
from rotationzoo.zoo.index import Index

_CARD = """---
library_name: rotationzoo
tags:
- kv-cache
- 2-bit
- rotation
{base_models}---

# A rotation zoo

Orthogonal matrices for 2-bit key/value caches, one folder each. \
`{index_name}` lists them with the sha256 of every file.

    rotationzoo pull {model} --repo {repo}

| model | revision | recipe | folder |
|---|---|---|---|
{rows}"""

ROOT_FILES = index.NAME, "README.md", "config.json"
"""The files at the root of a repository."""


def render_root_files(repo: str, content: Index) -> dict[str, bytes]:
    """Path -> content of the root files of a repository with this index."""
    contents = (
        content.text().encode(),
        _render_card(repo, content).encode(),
        b'{"library_name": "rotationzoo"}\n',
    )
    return dict(zip(ROOT_FILES, contents, strict=True))


def _render_card(repo: str, content: Index) -> str:
    models = sorted({entry.model for entry in content.entries})
    # Hugging Face accepts only hub ids as base models, and a local model's name has no owner.
    bases = "".join(f"- {model}\n" for model in models if "/" in model)
    base_models = f"base_model:\n{bases}base_model_relation: quantized\n" if bases else ""
    rows = ""
    for entry in content.entries:
        path, revision = entry.copies[0].path, entry.model_revision or ""
        rows += f"| {entry.model} | `{revision}` | {entry.recipe} | [{path}]({path}) |\n"
    return _CARD.format(
        base_models=base_models, index_name=index.NAME, model=models[0], repo=repo, rows=rows
    )
