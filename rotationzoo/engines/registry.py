"""The serving engines, one row each: the command line, `export`, docs/engines.md and the tests
take them from here.

A new engine is a module in `formats/` (`base.Engine` says what it defines) and a row here.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from rotationzoo.engines.base import Engine


@dataclass(frozen=True)
class Entry:
    """Where an engine is defined. Modules are imported when they are used: `--help` must not wait
    for torch."""

    module: str
    """A module of `engines/formats`."""
    needs_base: bool = False
    """Whether the export is a copy of a model file that the user gives, which `pull` cannot ask
    for."""


ENGINES = {
    "sglang": Entry("sglang"),
    "vllm": Entry("vllm"),
    "llama.cpp": Entry("llama_cpp", needs_base=True),
    "mlx": Entry("mlx"),
    "onnx": Entry("onnx"),
}
ENGINE_NAMES = tuple(ENGINES)
PULL_ENGINE_NAMES = tuple(name for name, entry in ENGINES.items() if not entry.needs_base)

# Typer makes the choices of an option from a Literal; mypy takes no computed one.
if TYPE_CHECKING:
    EngineName = str
    PullEngineName = str
else:
    EngineName = Literal[ENGINE_NAMES]
    PullEngineName = Literal[PULL_ENGINE_NAMES]


def load_engine(name: str) -> "Engine":
    """The module of an engine. Raises `KeyError` for a name that has no row."""
    module = importlib.import_module(f"rotationzoo.engines.formats.{ENGINES[name].module}")
    return cast("Engine", module)
