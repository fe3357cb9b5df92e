"""Text piece by piece, while a model writes it."""

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

_CONTEXT = 8  # tokens of the prompt that the first new ones are decoded with
_INCOMPLETE = "\ufffd"  # what the first bytes of a character are decoded to

END, LENGTH, INTERRUPTED = "end", "length", "interrupted"
"""Why a text ended: with the model's end token, at the limit, or with Ctrl-C."""
Write = Callable[[str], None]


class TextStream(BaseStreamer):
    """A streamer for transformers' `generate` that writes each token's text at once.

    A token may hold only a part of a character, and many tokenizers decode the space before a word
    only after other words. So tokens are decoded together with the last ones before them, and
    written when the character at their end is complete. transformers' `TextStreamer` waits for a
    space instead, and loses the space at the beginning of a line.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, write: Write):
        """`prompt`: the ids `[T]` that come before the text."""
        self.tokenizer, self._write = tokenizer, write
        self.ids: list[int] = []
        """The tokens written so far, with the one that ends the text."""
        self.text = ""
        self.times: list[float] = []
        """When the model was started, and when each token was known."""
        self.stop = LENGTH
        """`END`, `LENGTH` or `INTERRUPTED`."""
        self._context: list[int] = prompt[-_CONTEXT:].tolist()
        self._pending: list[int] = []
        self._started = False

    def start(self) -> None:
        """Start the clock."""
        self.times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, which comes first, or the next token."""
        if not self._started:
            self._started = True
            return
        self.times.append(time.perf_counter())
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
        if len(self.times) < 2:
            return None
        return self.times[1] - self.times[0]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of decoding, which begins after the first token. None where only that
        was written."""
        steps = len(self.times) - 2
        if steps < 1:
            return None
        return steps / (self.times[-1] - self.times[1])

    def _decode(self, last: bool) -> None:
        before = self._text_of(self._context)
        text = self._text_of([*self._context, *self._pending])
        if text.endswith(_INCOMPLETE) and not last:
            return
        new = text[len(before) :]
        if new:
            self.text += new
            self._context, self._pending = (self._context + self._pending)[-_CONTEXT:], []
            self._write(new)

    def _text_of(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
