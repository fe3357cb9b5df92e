"""One continuation of a prompt: its settings, the text while the model writes it with a given
cache, and how it compares with the exact model's."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.options import check_options
from rotationzoo.codec.settings import CacheOptions
from rotationzoo.errors import ModelUnavailable, RotationZooError, UsageError, as_unavailable
from rotationzoo.generation.prompt import Prompt
from rotationzoo.model.cache_names import cache_argument
from rotationzoo.model.loading import RunSettings, input_device
from rotationzoo.model.out_of_memory import is_out_of_memory
from rotationzoo.progress import Progress
from rotationzoo.recall.prompts import common_length

# Generation settings that a model's makers cannot override: exactly one text per prompt, token by
# token to its end. What these leave open, such as a repetition penalty, is as they recommend.
_PLAIN: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "use_cache": True,
    "return_dict_in_generate": False,
    "max_time": None,
    "stop_strings": None,
    "prompt_lookup_num_tokens": None,
    "cache_implementation": None,
}
MAX_NEW_TOKENS = 256
_CONTEXT = 8  # tokens of the prompt that the first new ones are decoded with
_INCOMPLETE = "\ufffd"  # what the first bytes of a character are decoded to

END, LENGTH, INTERRUPTED = "end", "length", "interrupted"
"""Why a text ended: with the model's end token, at the limit, or with Ctrl-C."""
Write = Callable[[str], None]


@dataclass(frozen=True)
class Generation(RunSettings):
    """The settings of one text. `api.generate` says what most of them are."""

    model: str
    prompt: str | None
    """The text to continue. None asks the demo model for a statement hidden in code."""
    rotations: str | Path | Artifact | None
    chat: bool = False
    max_new_tokens: int | None = None
    """`MAX_NEW_TOKENS` by default; for the demo's question, as many as its answer has."""
    cache: CacheOptions = field(default_factory=CacheOptions)
    prefill_chunk: int = 2048
    """Longer chunks need more memory, and read fewer tokens quantized."""
    anyway: bool = False
    compare: bool = False
    rope_scaling: str | None = None
    """None means as the rotations were calibrated."""

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


class TextStream(BaseStreamer):
    """A streamer for transformers' `generate` that writes each token's text at once.

    Many tokenizers decode the space before a word only after other words, so tokens are decoded
    together with the last ones before them, and written when the character at their end is
    complete. transformers' `TextStreamer` waits for a space instead, and loses that of a line's
    beginning.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, write: Write):
        """`prompt`: the ids `[T]` that come before the text."""
        self.tokenizer, self._write = tokenizer, write
        self.ids: list[int] = []
        """The tokens written so far, with the one that ends the text."""
        self.text = ""
        self.times: list[float] = []
        """When the model began to read, and when each token was known."""
        self.stop = LENGTH
        """`END`, `LENGTH` or `INTERRUPTED`."""
        self._context: list[int] = prompt[-_CONTEXT:].tolist()
        self._pending: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, which comes first, or the next token."""
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            return
        ids = value.flatten().tolist()
        self.ids += ids
        self._pending += ids
        self._decode(last=False)

    def end(self) -> None:
        """Write what is left, although its last character is not complete."""
        self._decode(last=True)

    @property
    def prompt_seconds(self) -> float | None:
        """Seconds until the first token. None where there is none."""
        return self.times[1] - self.times[0] if len(self.times) > 1 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first one. None where only that was written."""
        steps = len(self.times) - 2
        return steps / (self.times[-1] - self.times[1]) if steps > 0 else None

    def _decode(self, last: bool) -> None:
        rows = self._context, [*self._context, *self._pending]
        before, text = (str(self.tokenizer.decode(row, skip_special_tokens=True)) for row in rows)
        if text.endswith(_INCOMPLETE) and not last:
            return
        new = text[len(before) :]
        if new:
            self.text += new
            self._context, self._pending = (self._context + self._pending)[-_CONTEXT:], []
            self._write(new)


def find_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text. Makers name them in one of three places."""
    text_config = model.config.get_text_config(decoder=True)
    for settings in (model.generation_config, text_config, tokenizer):
        ids: int | list[int] | None = getattr(settings, "eos_token_id", None)
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def continue_prompt(
    model: PreTrainedModel,
    prompt: Prompt,
    job: Generation,
    stream: TextStream,
    progress: Progress,
    cache: DynamicCache | None = None,
) -> None:
    """Continue a prompt with the most probable tokens, through a cache or the model's own.

    The text goes to `stream`; Ctrl-C ends it like a limit. Raises `RotationZooError` for a model
    that fails when it runs, and `OSError` where the reader of the text, or a disk with weights,
    fails.
    """
    end_tokens, length = find_end_tokens(model, stream.tokenizer), len(prompt.ids)
    ids = prompt.ids[None].to(input_device(model))
    untyped: Any = model
    options = dict(_PLAIN)
    if cache is not None:
        options |= cache_argument(model, cache)
    # A cache class of the model's own is made too late for the library to read in chunks.
    has_cache = cache is not None or untyped._supports_default_dynamic_cache()
    if has_cache and length > job.prefill_chunk:
        options["prefill_chunk_size"] = job.prefill_chunk
    progress("reading the prompt", 0, 0)
    try:
        with as_unavailable(f"{job.model} fails when it runs"):
            untyped.generate(
                inputs=ids,
                attention_mask=torch.ones_like(ids),
                streamer=stream,
                max_new_tokens=prompt.max_new_tokens,
                eos_token_id=end_tokens or None,
                pad_token_id=0,  # nothing is padded, but without one the library warns
                **options,
            )
    except KeyboardInterrupt:
        stream.stop = INTERRUPTED
        stream.end()
    except ModelUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, OSError):  # such as a closed pipe of the text's reader
            raise cause from None
        if is_out_of_memory(cause):
            smaller = max(1, job.prefill_chunk // 4)
            raise RotationZooError(
                "the prompt, the cache and what the model computes do not fit the device's memory",
                hint=f"add: --prefill-chunk {smaller}, or give a shorter prompt",
            ) from error
        raise
    if stream.ids and stream.ids[-1] in end_tokens:
        stream.stop = END


def find_parting(one: TextStream, other: TextStream) -> dict[str, int] | None:
    """How many characters and tokens of two continuations are the same before the first difference,
    or None if they are the same as far as both go: one that was interrupted is only compared up to
    there."""
    token = common_length(one.ids, other.ids)
    cut_short = [len(each.ids) for each in (one, other) if each.stop == INTERRUPTED]
    if token in (*cut_short, max(len(one.ids), len(other.ids))):
        return None
    return {"character": common_length(one.text, other.text), "token": token}


def describe_text(prompt: Prompt, text: TextStream) -> dict[str, Any]:
    """A text, why it ended, and how fast prompt and text went; for the demo's own prompt also the
    question and the right answer."""
    length, seconds = len(prompt.ids), text.prompt_seconds
    report = {
        "prompt_tokens": length,
        "prompt_seconds": seconds,
        "prompt_tokens_per_second": length / seconds if seconds else None,
        "text": text.text,
        "tokens": len(text.ids),
        "tokens_per_second": text.tokens_per_second,
        "stop": text.stop,
    }
    if prompt.question:
        report |= {"question": prompt.question, "answer": prompt.answer}
    return report


def compare_texts(text: TextStream, exact: TextStream) -> dict[str, Any]:
    """The exact model's text, and where the two part."""
    return {
        "exact_text": exact.text,
        "exact_tokens": len(exact.ids),
        "exact_tokens_per_second": exact.tokens_per_second,
        "exact_stop": exact.stop,
        "parted_at": find_parting(text, exact),
    }
