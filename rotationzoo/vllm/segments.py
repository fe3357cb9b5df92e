"""The earlier tokens that the prompts of a step read: in which segments they are restored, so that
the memory for that does not grow with the context."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MOST = 32_768
"""Tokens of a segment on a GPU."""
FEW = 4096
"""Tokens of a segment for torch's attention, which writes down a weight for each."""


@dataclass(frozen=True)
class Segment:
    """Some earlier tokens of the C prompts of a step, one prompt after another. Many prompts have
    none in it. Token `j` of a prompt has the position `first + j`, and `gap` more from the position
    `jump` on."""

    is_exact: bool
    """Whether the tokens are copies, or dequantized codes."""
    bounds: torch.Tensor
    """int32 `[C + 1]`: where the tokens of each prompt begin."""
    firsts: torch.Tensor
    """int32 `[C]`, and so are the next two."""
    jumps: torch.Tensor
    gaps: torch.Tensor
    room: int
    """It has no more tokens."""
    longest: int
    """No prompt has more tokens in it."""

    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt of each token, and its position there, int64 each. Waits for a GPU."""
        bounds = self.bounds.long()
        prompt = torch.repeat_interleave(bounds.diff())
        position = self.firsts[prompt] + torch.arange(len(prompt), device=prompt.device)
        position = position - bounds[prompt]
        return prompt, position + self.gaps[prompt] * (position >= self.jumps[prompt])


@dataclass(frozen=True)
class Prompts:
    """The C requests of a step that have several new tokens each. They are its last ones."""

    row: int
    """The number of the first of these requests."""
    token: int
    """The number of the first of their tokens, among the new ones of the step."""
    bounds: torch.Tensor
    """int32 `[C + 1]`: where the new tokens of each begin, counted from there."""
    longest: int
    """No request has more new tokens."""
    segments: Sequence[Segment]
    """What they read beside their new tokens: first all that is exact, and then the codes."""


def plan_segments(
    known: torch.Tensor, windows: int, starts: torch.Tensor, recents: torch.Tensor, most: int
) -> Iterator[Segment]:
    """Cut the earlier tokens of C prompts into segments of at most `most` tokens.

    `known` int64 `[C]`, not on the device, says how many there are. The tokens before `starts` and
    from `recents` on, int32 `[C]` on the device, are exact, at most `windows` of each prompt.
    Nothing waits for the device, and nothing loops over prompts.
    """
    device, none = starts.device, torch.zeros_like(starts)
    contexts = _move(known.int(), device)
    starts = torch.minimum(starts, contexts)
    kinds = (
        (True, known.clamp(max=windows), starts + contexts - recents, none, starts),
        (False, known, recents - starts, starts, none),
    )
    for is_exact, sizes, counts, firsts, jumps in kinds:
        parts = _cut(sizes, most)
        offsets, stops = _move(parts.int(), device)
        numbers = (torch.minimum(stops, counts) - offsets).clamp(min=0)
        bounds = torch.nn.functional.pad(numbers.cumsum(1, dtype=torch.int32), (1, 0))
        gaps = recents - starts if is_exact else none
        for bound, offset, room in zip(bounds, offsets, parts[1] - parts[0], strict=True):
            most_of_all, longest = int(room.sum()), int(room.max())
            first = offset + firsts
            yield Segment(is_exact, bound, first, jumps, gaps, most_of_all, longest)


def _cut(sizes: torch.Tensor, most: int) -> torch.Tensor:
    """Where each of S segments begins and ends in lists of these sizes `[C]`, int64
    `[2, S, C]`."""
    begins = sizes.cumsum(0) - sizes
    edges = torch.arange(0, int(sizes.sum()), most)[:, None]
    both = torch.stack([edges - begins, edges + most - begins])
    return torch.minimum(both.clamp(min=0), sizes)


def _move(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it."""
    if device.type == "cuda":  # from memory that is not pinned, the copy would wait
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
