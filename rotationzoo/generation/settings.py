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
        check_options({**self.cache})
        self.check_memory_limits()
