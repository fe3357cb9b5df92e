"""The settings of one text that a model writes."""

from dataclasses import dataclass, field
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.options import check_options
from rotationzoo.codec.settings import CacheOptions
from rotationzoo.errors import UsageError
from rotationzoo.model.loading import RunSettings

MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Without a temperature, it is the most probable one."""

    temperature: float | None = None
    """0 and None both stand for the most probable token."""
    top_p: float | None = None
    """Sample among the most probable tokens whose probabilities add up to this."""
    seed: int | None = None
    """0 by default."""

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random."""
        return bool(self.temperature)

    def check(self) -> None:
        """Raise `UsageError` for settings out of range, or that the most probable token ignores."""
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise UsageError(
                f"--temperature {self.temperature} is no temperature", hint="--temperature 0.7"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(
                f"--top-p {self.top_p} is no share above 0 and at most 1", hint="--top-p 0.9"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed} is no number of 64 bits", hint="--seed 1")
        for option, value in (("--top-p", self.top_p), ("--seed", self.seed)):
            if value is not None and not self.samples:
                raise UsageError(
                    f"{option} is for sampling, and without a temperature nothing is sampled",
                    hint="add: --temperature 0.7",
                )


@dataclass(frozen=True)
class Generation(RunSettings):
    """The settings of one text, as the user gave them."""

    model: str
    prompt: str | None
    """The text to continue. None asks the demo model for a statement hidden in code."""
    rotations: str | Path | Artifact | None
    """An artifact or its folder, or a name in the zoo, which is pulled. None is no rotation."""
    chat: bool = False
    """Whether the prompt is a user's message, put into the tokenizer's chat template."""
    max_new_tokens: int | None = None
    """`MAX_NEW_TOKENS` by default; for the demo's question, as many as its answer has."""
    sampling: Sampling = field(default_factory=Sampling)
    cache: CacheOptions = field(default_factory=CacheOptions)
    """The format, the windows and the rounding, where they differ from the recipe's."""
    prefill_chunk: int = 2048
    """The prompt is read in chunks of so many tokens, each of which reads the ones before it from
    the cache. Longer ones need more memory, and read fewer tokens quantized."""
    anyway: bool = False
    """Whether rotations that were made for other weights are used, too."""
    compare: bool = False
    """Whether the exact model continues the prompt too."""
    rope_scaling: str | None = None
    """How the model's RoPE is scaled, as in a recipe. None means as the rotations were
    calibrated."""

    def check(self) -> None:
        """Raise `UsageError` for settings out of range, and for some that exclude each other."""
        numbers = {"--max-new-tokens": self.max_new_tokens, "--prefill-chunk": self.prefill_chunk}
        for option, number in numbers.items():
            if number is not None and number < 1:
                raise UsageError(f"{option} must be at least 1, not {number}", hint=f"{option} 256")
        if self.prompt is None and (self.model != "demo" or self.chat):
            raise UsageError(
                "there is no prompt",
                hint='give one with --prompt "TEXT" or --file FILE, or pipe it into the command',
            )
        if self.prompt is not None and not self.prompt.strip():
            raise UsageError("the prompt is empty", hint="give some text to continue")
        self.sampling.check()
        check_options({**self.cache})
        self.check_memory_limits()
