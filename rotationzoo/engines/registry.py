"""The registry of serving engines, one row each.

The command line, `export`, docs/engines.md and the tests take the engines from here. To add one,
write a module in `formats/` (`base.Engine` says what it defines) and add a row here.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from rotationzoo.engines.base import Engine


@dataclass(frozen=True)
class Entry:
    """Where an engine is defined.

    Its module is imported only when it is used, so that `--help` does not wait for torch.
    """

    module: str
    """A module of `engines/formats`."""
    needs_base: bool = False
    """Whether the export copies a model file that the user must give. `pull` cannot ask for one."""
    released: str = ""
    """What a released version of the engine takes by `rotationzoo serve`, in words. Empty if only
    forks and pull requests read artifacts."""


ENGINES = {
    "sglang": Entry("sglang"),
    "vllm": Entry("vllm", released="a released vLLM takes the whole artifact"),
    "llama.cpp": Entry("llama_cpp", needs_base=True),
    "mlx": Entry("mlx"),
}
ENGINE_NAMES = tuple(ENGINES)
PULL_ENGINE_NAMES = tuple(name for name, entry in ENGINES.items() if not entry.needs_base)

# Typer takes an option's choices from a Literal, but mypy does not accept a computed Literal.
if TYPE_CHECKING:
    EngineName = str
    PullEngineName = str
else:
    EngineName = Literal[ENGINE_NAMES]
    PullEngineName = Literal[PULL_ENGINE_NAMES]


def load_engine(name: str) -> "Engine":
    """The module of an engine. Raises `KeyError` for an unknown name."""
    module = importlib.import_module(f"rotationzoo.engines.formats.{ENGINES[name].module}")
    return cast("Engine", module)
