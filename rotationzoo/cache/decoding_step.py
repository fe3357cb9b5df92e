"""One decoding step of one layer: its new tokens read the pages, and rows are restored only for a
reader that knows no pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_map

from rotationzoo.cache.stream import Rows, Stream
from rotationzoo.codec.attention import Scores

MOST_CANDIDATES = 16
"""New tokens of a step that reads pages. More are read from restored rows, as a prompt is."""


@dataclass
class MaskCheck:
    """Whether a mask hides padding and later tokens, and nothing else.

    To look at a mask waits for a GPU. So all layers share this, and each mask is looked at once.
    """

    mask: torch.Tensor | None = None
    passed: bool = False

    def passes(self, mask: torch.Tensor, step: "DecodingStep") -> bool:
        """Check the mask of a step: `[B, columns]`, or `[B, H, T, columns]` that is boolean (True =
        read) or additive. B and H may be 1."""
        if mask is not self.mask:
            self.mask, self.passed = mask, _hides_only_padding(mask, step)
        return self.passed


@dataclass(eq=False)
class DecodingStep:
    """The tokens that the new ones of a call read in one layer, until the next call."""

    streams: Sequence[Stream]
    starts: Sequence[int]
    """The column at which the rows of each stream begin."""
    columns: int
    """How many columns there are, with padding and the new tokens."""
    new: int
    """How many tokens are new: the last ones."""
    restore: Callable[[], Rows]
    """Restores the keys and values of all columns."""
    masks: MaskCheck = field(default_factory=MaskCheck)

    @cached_property
    def rows(self) -> Rows:
        """The keys and values `[B, H, columns, D]` that are read, in the model's frame."""
        return self.restore()

    @property
    def is_restored(self) -> bool:
        """Whether something has asked for the rows."""
        return "rows" in self.__dict__

    def attend(self, query: torch.Tensor, scores: Scores) -> torch.Tensor:
        """The attention output `[B, H_q, T, D_v]` of the new tokens' queries `[B, H_q, T, D]`."""
        if len(self.streams) == 1:
            return self.streams[0].attend(query, scores)
        pairs = zip(self.streams, query.split(1), strict=True)
        return torch.cat([stream.attend(part, scores) for stream, part in pairs])


class LazyRows(torch.Tensor):
    """The keys or the values of a step, which hold no numbers until an operation asks for them.

    They have the shape, type and device of the rows. An attention that reads pages takes the `step`
    and asks for nothing; any other operation of torch gets the restored rows. So a model that does
    more with its keys and values than attend over them computes what it always does.
    """

    step: DecodingStep
    side: int
    # Only what reaches the dispatcher reads numbers.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, step: DecodingStep, side: int, like: torch.Tensor) -> "LazyRows":
        """The keys (side 0) or values (1) of a step, for new rows like these `[B, H, T, D]`."""
        batch, heads, _, dim = like.shape
        shape = batch, heads, step.columns, dim
        lazy: LazyRows = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device
        )
        lazy.step, lazy.side = step, side
        return lazy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation with rows."""
        return function(*tree_map(_rows, args), **tree_map(_rows, kwargs or {}))


def _hides_only_padding(mask: torch.Tensor, step: DecodingStep) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.shape[-1] != step.columns:
        return False
    column = torch.arange(step.columns, device=mask.device)
    shown = column >= torch.tensor(step.starts, device=mask.device)[:, None]
    if mask.ndim == 4:
        last = column[-step.new :, None]
        shown = shown[:, None, None] & (column <= last)
    if not mask.is_floating_point():
        return bool((mask.bool() == shown).all())
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return bool(torch.where(shown, mask == 0, hidden).all())


def _rows(argument: Any) -> Any:
    return argument.step.rows[argument.side] if isinstance(argument, LazyRows) else argument
