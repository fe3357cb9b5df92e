"""Serving engines, one row each: what an engine takes of an artifact.

The command line, `export`, `evaluate`, `generate`, docs/engines.md and the tests take the engines
from here. To add one, write a module in `engines/formats` (`engines.base.WriteFiles` says what it
defines) and add a row here.
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
    """What an engine takes of an artifact. Everything else is left out, and said."""

    module: str = ""
    """The module of `engines/formats` that writes its files, imported only when it is used, so that
    `--help` does not wait for torch. Empty if the engine reads artifacts themselves."""
    command: str = ""
    """The command of rotationzoo that starts an engine which reads artifacts themselves."""
    format: str = ""
    """Its format, a name in `codec.formats.SIMULATED`. Empty if only the engine has its codec."""
    rotates: bool = True
    """Whether it takes rotations, and not the bits of layers alone."""
    heads: bool = True
    """Whether it takes one matrix per KV head, and not one per layer alone."""
    means: tuple[str, ...] = ()
    """The sides whose means it subtracts."""
    takes: tuple[str, ...] = HEADS.sides
    """The sides that it rotates."""
    on_cpu: tuple[str, ...] = ()
    """Further ones, on a CPU alone."""
    clip: Literal["none", "one", "side", "head"] = "side"
    """`none`, `one` clip ratio for everything, one per `side` (keys and values), or one per
    `head`."""
    windows: bool = True
    """Whether it keeps sink and recent tokens exact."""
    budget: bool = False
    """Whether it stores rows with the bits that a budget gives them."""
    sliding: bool = True
    """Whether it stores layers with a sliding window in 2 bits. Where not, all others get the same
    bits of a budget."""
    prefill_layout: Literal["server", "window"] = "server"
    """Which tokens of earlier chunks of a prompt stay exact, as in `codec.windows`."""
    gguf: tuple[str, ...] = ()
    """The architectures of GGUF files that it loads with rotations; `*` is any."""
    needs_base: bool = False
    """Whether the export copies a model file that the user must give. `pull` cannot ask for one."""

    @property
    def uncentered(self) -> tuple[str, ...]:
        """The sides that keep their mean."""
        return tuple(side for side in self.every_side if side not in self.means)

    @property
    def every_side(self) -> tuple[str, ...]:
        """All sides that it rotates anywhere."""
        return *self.takes, *self.on_cpu

    @property
    def recipe(self) -> str:
        """The preset to calibrate with: the default, one for 2-bit codes, or the one that is made
        for one rotation per layer and no means."""
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
        on_cpu=LATENTS.sides,
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
        names = ", ".join(ENGINES)
        hint = f"give one of {names}"
        raise UsageError(f"there is no engine {name!r}{nearest(name, ENGINES)}", hint)
    return ENGINES[name]


def check_sides(name: str, sides: Collection[str]) -> None:
    """Raise `UsageError` for an engine that does not take rotations of these sides."""
    takes = find_engine(name).every_side
    if not set(sides) <= set(takes):
        problem = f"{name} reads rotations of {rows_of(takes).words}"
        hint = f"--for {' or '.join(engines_for(sides))}"
        raise UsageError(f"{problem}, and these are of {rows_of(sides).name}", hint)


def engines_for(sides: Collection[str]) -> list[str]:
    """The engines that take rotations of these sides; those that users have first."""
    return [name for name, entry in ENGINES.items() if set(sides) <= set(entry.takes)]


def choose_format(engine: str, has_budget: bool = False) -> str:
    """The format in which an engine's cache is simulated, for rotations that may have a budget of
    bits. Raises `UsageError` for a codec that only the engine has."""
    entry = find_engine(engine)
    if entry.format:
        return BUDGETED if has_budget and entry.budget else entry.format
    hint = "measure on that engine; for another format, leave out --for: --format sglang"
    raise UsageError(f"{engine} rounds to a codebook of its own, which is not simulated here", hint)
