"""Serving engines, one row each: the parts of an artifact that an engine takes.

The command line, docs/engines.md and the tests read this table. A new engine has a row here and a
module in `engines/formats`, which `engines.base.WriteFiles` describes.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rotationzoo.codec.formats import BUDGETED
from rotationzoo.errors import UsageError
from rotationzoo.sides import EVERY_SIDE, HEADS, LATENTS, rows_of
from rotationzoo.words import nearest


@dataclass(frozen=True)
class Entry:
    """The parts of an artifact that an engine takes. Reports name those that are left out."""

    module: str = ""
    """The module of `engines/formats` that writes its files, imported only for use, because
    `--help` must not wait for torch. Empty if the engine reads artifacts."""
    command: str = ""
    """The command of rotationzoo that starts an engine which reads artifacts."""
    format: str = ""
    """Its format, a name in `codec.formats.SIMULATED`. Empty if its codec is not simulated."""
    rotates: bool = True
    """False if it takes only the bits of layers, and no rotations."""
    heads: bool = True
    """Whether it takes one matrix per KV head, or only one per layer."""
    means: tuple[str, ...] = ()
    """The sides whose means it subtracts."""
    takes: tuple[str, ...] = HEADS.sides
    """The sides that it rotates."""
    clip: Literal["none", "one", "side", "head"] = "side"
    """What has its own clip ratio: nothing, `one` for everything, a `side`, or a KV `head`."""
    windows: bool = True
    """Whether it keeps sink and recent tokens exact."""
    budget: bool = False
    """Whether it supports a budget of bits."""
    sliding: bool = True
    """Whether layers with a sliding window are in 2 bits. If not, all others get the same bits."""
    prefill_layout: Literal["server", "window"] = "server"
    """Which tokens of earlier chunks of a prompt stay exact, as in `codec.windows`."""
    gguf: tuple[str, ...] = ()
    """The architectures of GGUF files that it loads with rotations; `*` is any."""
    needs_base: bool = False
    """Whether the export copies a model file that the user gives; `pull` cannot ask for it."""

    @property
    def uncentered(self) -> tuple[str, ...]:
        """The sides that keep their mean."""
        return tuple(side for side in self.takes if side not in self.means)

    @property
    def recipe(self) -> str:
        """The preset to calibrate with."""
        if self.budget:
            return "transform"
        return "oscar" if self.heads else "oscar-v1"


_FORKS = "qwen3", "qwen3moe", "qwen35", "gemma4"
DEFAULT = "transformers"
ENGINES = {
    "vllm": Entry(
        command="serve",
        format="vllm",
        means=EVERY_SIDE,
        takes=EVERY_SIDE,
        clip="head",
        budget=True,
        sliding=False,
        prefill_layout="window",
    ),
    "vllm-oscar": Entry("vllm_oscar", format="vllm", heads=False, windows=False),
    "sglang": Entry("sglang", format="sglang", means=("key",)),
    "sglang-mla": Entry("sglang", format="sglang", takes=LATENTS.sides, clip="none"),
    "llama.cpp": Entry("llama_cpp", heads=False, clip="one", gguf=_FORKS, needs_base=True),
    "modelopt": Entry("modelopt", rotates=False, clip="none", windows=False, budget=True),
    "transformers": Entry(
        command="generate",
        format="sglang",
        means=EVERY_SIDE,
        takes=EVERY_SIDE,
        clip="head",
        budget=True,
        gguf=("*",),
    ),
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


def find_engine(name: str) -> Entry:
    """The row of an engine. Raises `UsageError` for an unknown name."""
    if name not in ENGINES:
        hint = f"give one of {', '.join(ENGINES)}"
        raise UsageError(f"there is no engine {name!r}{nearest(name, ENGINES)}", hint)
    return ENGINES[name]


def check_sides(name: str, sides: Collection[str]) -> None:
    """Raise `UsageError` for an engine that does not take rotations of these sides."""
    takes = find_engine(name).takes
    if not set(sides) <= set(takes):
        problem = f"{name} reads rotations of {rows_of(takes).words}"
        hint = f"--for {' or '.join(engines_for(sides))}"
        raise UsageError(f"{problem}, and these are of {rows_of(sides).name}", hint)


def engines_for(sides: Collection[str]) -> list[str]:
    """The engines that take rotations of these sides, the most common ones first."""
    return [name for name, entry in ENGINES.items() if set(sides) <= set(entry.takes)]


def choose_format(engine: str, has_budget: bool = False) -> str:
    """The format that simulates an engine's cache, for rotations with or without a budget of bits.
    Raises `UsageError` for a codec that is not simulated."""
    entry = find_engine(engine)
    if entry.format:
        return BUDGETED if has_budget and entry.budget else entry.format
    hint = "measure on that engine; for another format, leave out --for: --format sglang"
    raise UsageError(f"{engine} rounds to a codebook of its own, which is not simulated here", hint)
