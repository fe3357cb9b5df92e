"""The hubs, one row each: the command line, the index and the tests take them from here.

A new hub is a module beside this one (see `protocol.Hub` for what it defines) and a row here.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from rotationzoo.zoo.hubs.protocol import Hub


@dataclass(frozen=True)
class HubEntry:
    """What is known of a hub without importing its client."""

    title: str
    """Its name in sentences."""
    abbreviation: str
    """Its name in the narrow column of `list`."""
    module: str
    """A module of `zoo/hubs`. It is imported when it is used: `--help` must not wait for it."""
    class_name: str


HUBS = {
    "huggingface": HubEntry("Hugging Face", "hf", "huggingface", "HuggingFace"),
    "modelscope": HubEntry("ModelScope", "ms", "modelscope", "ModelScope"),
}
HUB_NAMES = tuple(HUBS)
DEFAULT_HUB = HUB_NAMES[0]  # where to look and publish when nobody names a hub

# Typer makes the choices of an option, and pydantic the check of a field, from a Literal; mypy
# takes no computed one.
if TYPE_CHECKING:
    HubName = str
else:
    HubName = Literal[HUB_NAMES]


def open_hub(name: str) -> "Hub":
    """A client of the hub. Raises `KeyError` for a name that has no row."""
    entry = HUBS[name]
    module = importlib.import_module(f"rotationzoo.zoo.hubs.{entry.module}")
    return cast("Hub", getattr(module, entry.class_name)())
