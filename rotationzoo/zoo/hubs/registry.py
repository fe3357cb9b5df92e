"""The table of hubs, from which the command line, the index and the tests take their names."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from rotationzoo.zoo.hubs.protocol import Hub


@dataclass(frozen=True)
class HubEntry:
    """Everything known about a hub without importing its client."""

    title: str
    """Its name in sentences."""
    abbreviation: str
    """Its name in the narrow column of `list`."""
    class_name: str
    """Its class in the module of `zoo/hubs` that has the hub's name, imported only on use."""
    main: str
    """The branch that a repository begins with."""
    repo_page: str
    """This and below are addresses of pages and of files themselves: `str.format` templates of
    `repo`, `revision` and `path`."""
    file_page: str
    file: str


HUBS = {
    "huggingface": HubEntry(
        title="Hugging Face",
        abbreviation="hf",
        class_name="HuggingFace",
        main="main",
        repo_page="https://huggingface.co/{repo}",
        file_page="https://huggingface.co/{repo}/blob/{revision}/{path}",
        file="https://huggingface.co/{repo}/resolve/{revision}/{path}",
    ),
    "modelscope": HubEntry(
        title="ModelScope",
        abbreviation="ms",
        class_name="ModelScope",
        main="master",
        repo_page="https://modelscope.cn/models/{repo}",
        file_page="https://modelscope.cn/models/{repo}/file/view/{revision}/{path}",
        file="https://modelscope.cn/models/{repo}/resolve/{revision}/{path}",
    ),
}
HUB_NAMES = tuple(HUBS)
DEFAULT_HUB = HUB_NAMES[0]  # where to look and publish if the user names no hub

# Typer derives an option's choices from a Literal, and pydantic a field's check. mypy does not
# accept a computed Literal, so it sees `str`.
if TYPE_CHECKING:
    HubName = str
else:
    HubName = Literal[HUB_NAMES]


def open_hub(name: str) -> "Hub":
    """The client of a hub. Raises `KeyError` if the table has no such name."""
    class_name = HUBS[name].class_name
    module = importlib.import_module(f"rotationzoo.zoo.hubs.{name}")
    return cast("Hub", getattr(module, class_name)())
