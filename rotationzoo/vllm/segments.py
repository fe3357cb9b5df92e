"""What is known of a step, and what its prompts read, cut into parts that are restored one at a
time, so that the memory for that does not grow with the context."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

LONG = 32_768
"""Tokens of a segment on a GPU."""
SHORT = 4096
"""Tokens of a segment for torch's attention, which writes down a weight for each."""
FEW = 8
"""So many new tokens of a request are read by the kernel of decoding steps. On an H100, with 4
query heads on a KV head, that takes .35 to .77 of a prompt's time; 16 would take .60 to 1.30."""


@dataclass(frozen=True)
class Known:
    """What is known of a step without waiting for a device: int64 tensors on the CPU."""

    counts: torch.Tensor
    """`[B]`: new tokens of each request. Requests with few come before those with many."""
    lengths: torch.Tensor
    """`[B]`: tokens of each request, right where many are new."""
    most_tokens: int
    """No request has more tokens."""
    few: int = FEW
    """So many new tokens are few."""

    @cached_property
    def decodes(self) -> int:
        """How many requests come before the first with many new tokens."""
        many = (self.counts > self.few).nonzero()
        return int(many[0]) if len(many) else len(self.counts)

    @cached_property
    def most_new(self) -> int:
        """None of these has more new tokens."""
        return max(1, int(self.counts[: self.decodes].max())) if self.decodes else 1

    @property
    def few_tokens(self) -> int:
        """How many new tokens these have together."""
        return int(self.counts[: self.decodes].sum())

    @property
    def has_prompts(self) -> bool:
        """Whether any request has many new tokens."""
        return self.decodes < len(self.counts)

    def spread(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What `DecodeMetadata` says of the first requests, which have so many rows."""
        counts, new = self.counts[: self.decodes], self.most_new
        # Without tokens are requests that fill up the batch of a graph.
        if ((counts == new) | (counts == 0)).all() and tokens == len(counts) * new:
            return None
        ends, request = counts.cumsum(0), torch.repeat_interleave(counts)
        rows = (ends[:, None] - new + torch.arange(new)).clamp(min=0).flatten()
        back = torch.arange(len(request)) - ends[request] + (request + 1) * new
        back = torch.nn.functional.pad(back, (0, tokens - len(back)))
        return move(rows, device), move(back, device)


@dataclass(frozen=True)
class Segment:
    """Tokens of C prompts, one prompt after another. A prompt may have none in it. Token `j` of a
    prompt has the position `first + j`, and `gap` more from the position `jump` on."""

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
class Exact:
    """What some prompts of a step read exact: the windows before their new tokens, and these."""

    prompts: slice
    """Which of the C prompts they are."""
    tokens: slice
    """Which of the prompts' new tokens are theirs."""
    bounds: torch.Tensor
    """int32: where the new tokens of each begin."""
    longest: int
    """None of them has more new tokens."""
    read: Segment


@dataclass(frozen=True)
class Prompts:
    """The C requests of a step that have many new tokens each. They are its last ones."""

    token: int
    """The number of the first of their tokens, among the new ones of the step."""
    page_table: torch.Tensor
    """Their rows of the step's, int64 `[C, N]`."""
    contexts: torch.Tensor
    """int32 `[C]`: how many tokens each has before its new ones."""
    bounds: torch.Tensor
    """int32 `[C + 1]`: where the new tokens of each begin, counted from the first of these."""
    longest: int
    """No request has more new tokens."""
    exact: Sequence[Exact]
    """Together, all prompts; none where no request has a token before its new ones."""
    codes: Sequence[Segment]
    """All other tokens."""


def plan_exact(  # noqa: PLR0913 (what is known, and what the device has)
    known: torch.Tensor,
    new: torch.Tensor,
    windows: int,
    starts: torch.Tensor,
    recents: torch.Tensor,
    contexts: torch.Tensor,
    most: int,
) -> Iterator[Exact]:
    """Group C prompts so that each group reads at most `most` tokens exact, or is one prompt.

    `known` and `new` int64 `[C]`, not on the device, say how many tokens are before the new ones,
    and how many are new; `contexts` int32 `[C]` is `known` on the device. The tokens before
    `starts` and from `recents` on, int32 `[C]` there, are exact, at most `windows` of each prompt.
    Nothing waits for the device, and nothing loops over prompts.
    """
    sizes = known.clamp(max=windows) + new
    counts = starts + contexts - recents + move(new.int(), starts.device)
    none, begin = torch.zeros_like(starts), 0
    ends, firsts = sizes.cumsum(0), new.cumsum(0) - new
    while begin < len(sizes):
        limit = int(ends[begin] - sizes[begin]) + most
        end = max(begin + 1, int(torch.searchsorted(ends, limit, right=True)))
        part, first = slice(begin, end), int(firsts[begin])
        tokens = slice(first, first + int(new[part].sum()))
        of_all = bounds_of(counts[part]), none[part], starts[part], (recents - starts)[part]
        read = Segment(*of_all, int(sizes[part].sum()), int(sizes[part].max()))
        bounds = move(bounds_of(new[part]), starts.device)
        yield Exact(part, tokens, bounds, int(new[part].max()), read)
        begin = end


def plan_codes(
    known: torch.Tensor, starts: torch.Tensor, recents: torch.Tensor, most: int
) -> Iterator[Segment]:
    """Cut the tokens of C prompts from `starts` to `recents` into segments of at most `most`
    tokens; with the arguments of `plan_exact`, of which nothing waits either."""
    begins = known.cumsum(0) - known
    edges = torch.arange(0, int(known.sum()), most)[:, None]
    parts = torch.stack([edges - begins, edges + most - begins]).clamp(min=0)
    parts = torch.minimum(parts, known)
    offsets, stops = move(parts.int(), starts.device)
    counts = (torch.minimum(stops, recents - starts) - offsets).clamp(min=0)
    none, firsts = torch.zeros_like(starts), offsets + starts
    several = zip(bounds_of(counts), firsts, parts[1] - parts[0], strict=True)
    for bounds, first, rooms in several:
        yield Segment(bounds, first, none, none, int(rooms.sum()), int(rooms.max()))


def bounds_of(counts: torch.Tensor) -> torch.Tensor:
    """Where lists of these lengths `[..., C]` begin, and the last one ends, int32
    `[..., C + 1]`."""
    return torch.nn.functional.pad(counts.cumsum(-1, dtype=torch.int32), (1, 0))


def move(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it."""
    if device.type == "cuda":  # from memory that is not pinned, the copy would wait
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
