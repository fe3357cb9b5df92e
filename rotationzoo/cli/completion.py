"""Completion of arguments and options in a shell: models, recipes, artifacts, published rotations.

A shell asks at every press of the tab key. Nothing here imports torch or reads more than names. A
name that no function here knows is left to the shell, which offers files.
"""

import json
from collections.abc import Iterable
from glob import escape, iglob
from itertools import islice
from pathlib import Path

from rotationzoo.capacity.cards import CARDS
from rotationzoo.recall.exercises import TASKS

RECIPES = ("oscar", "oscar-v1", "hadamard", "random", "identity")
"""The presets, which `recipe.loading` defines; a test compares the two."""
"""The recall tasks, which `recall.prompts` defines; a test compares the two."""
_INDEX = Path(__file__).parents[1] / "data" / "zoo_index.json"
_MOST = 200  # names; a longer list is not read


def complete_model(incomplete: str) -> list[str]:
    """The demo, and the models with published rotations."""
    return _matching(["demo", *_published()], incomplete)


def complete_published(incomplete: str) -> list[str]:
    """The models whose rotations `pull` fetches, as far as the bundled index knows them."""
    return _matching(_published(), incomplete)


def complete_published_recipe(incomplete: str) -> list[str]:
    """The recipes of all published rotations, because Typer does not say which model was typed."""
    recipes = _published().values()
    return _matching([name for names in recipes for name in names], incomplete)


def complete_recipe(incomplete: str) -> list[str]:
    """The presets, and YAML files here or in a folder."""
    return _matching([*RECIPES, *_files(incomplete, ".yaml")], incomplete)


def complete_artifact(incomplete: str) -> list[str]:
    """The artifacts in the folder `rotations`, here, and below what has been typed."""
    typed = escape(incomplete)
    patterns = [f"{typed}*/manifest.json", f"{typed}*/*/manifest.json"]
    if not incomplete:  # whatever folder this is, its subfolders may be many
        patterns = ["rotations/*/manifest.json", "*/manifest.json"]
    manifests = (path for pattern in patterns for path in iglob(pattern))
    folders = [str(Path(path).parent) for path in islice(manifests, _MOST)]
    return _matching(folders, incomplete)


def complete_rotations(incomplete: str) -> list[str]:
    """The values of `generate --rotations`: artifacts, names in the zoo, or none."""
    names = [*complete_artifact(incomplete), *_published(), "none"]
    return _matching(names, incomplete)


def complete_data(incomplete: str) -> list[str]:
    """The bundled text, and files of text."""
    texts = _files(incomplete, ".jsonl", ".txt", ".parquet")
    return _matching(["bundled", *texts], incomplete)


def complete_tasks(incomplete: str) -> list[str]:
    """The recall tasks, also after a comma."""
    before, comma, _ = incomplete.rpartition(",")
    earlier = before.split(",")
    names = [before + comma + task for task in TASKS if task not in earlier]
    if not comma:
        names += ["all", "none"]
    return _matching(names, incomplete)


def complete_card(incomplete: str) -> list[str]:
    """The GPUs that `plan` knows, without the spaces that a shell would split them at."""
    return _matching([name.replace(" ", "-") for name in CARDS], incomplete)


def complete_index(incomplete: str) -> list[str]:
    """The index that needs no network, and JSON files."""
    return _matching(["bundled", *_files(incomplete, ".json")], incomplete)


def _published() -> dict[str, list[str]]:
    """Model -> recipes that `pull` fetches, in the bundled index; empty if it cannot be read."""
    try:
        entries = json.loads(_INDEX.read_bytes())["entries"]
        recipes: dict[str, list[str]] = {}
        for entry in entries:
            if entry.get("format", "rotationzoo") in ("rotationzoo", "oscar"):
                recipes.setdefault(entry["model"], []).append(entry["recipe"])
    except (OSError, ValueError, LookupError, TypeError):  # no reason to disturb who is typing
        return {}
    return recipes


def _files(incomplete: str, *suffixes: str) -> Iterable[str]:
    """Files with one of these suffixes, here or in a folder, whose path begins as it was typed."""
    typed = escape(incomplete)
    patterns = [f"{typed}*{suffix}" for suffix in suffixes]
    patterns += [f"{typed}*/*{suffix}" for suffix in suffixes if incomplete]
    return islice((path for pattern in patterns for path in iglob(pattern)), _MOST)


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    """Each name once that begins as it was typed. A terminal obeys characters that are not
    printable, so names with such characters are not offered."""
    unique = dict.fromkeys(names)
    return [name for name in unique if name.startswith(incomplete) and name.isprintable()]
