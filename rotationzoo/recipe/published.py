"""What may be published of a recipe: its content without local paths, and its hash."""

import hashlib
import json
from pathlib import Path
from typing import Any

FILES = (".jsonl", ".txt", ".parquet")
"""Suffixes of text files. A `data.source` without one of them is a data set id."""
_PLACES = ("source", "prompts")  # keys of `Data` that may hold paths


def digest(content: dict[str, Any]) -> str:
    """sha256 of a recipe's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def without_paths(content: dict[str, Any]) -> dict[str, Any]:
    """A recipe's content in the form of `Recipe.published`."""
    data = content["data"]
    names = {key: name_of(place) for key, place in data.items() if key in _PLACES}
    model = content.get("model")
    return {**content, "model": model and name_of(model), "data": {**data, **names}}


def name_of(place: str) -> str:
    """The publishable name of a place: the last part of a local path, or the whole of a hub id or a
    URL."""
    # A slash alone does not make a path: hub ids such as Qwen/Qwen3-8B have one.
    is_path = place.startswith(("/", "./", "../", "~")) or Path(place).suffix.lower() in FILES
    return Path(place).name if is_path and "://" not in place else place
