"""What is known of a step, and what its prompts read, cut into parts that are restored one at a
time, so that the memory for that does not grow with the context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

LONG = 32_768
"""Tokens of a segment on a GPU."""
SHORT = 4096
"""Tokens of a segment for torch's attention, which writes down a weight for each."""
FEW = 8
"""So many new tokens of a request are read by the kernel of decoding steps. On an H100, with 4
query heads on a KV head, that takes .35 to .77 of a prompt's time; 16 would take .60 to 1.30."""


@dataclass(frozen=True, eq=False)
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
    meets: bool = True
    """Whether a request may read tokens that another one stores in this step."""

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

    @cached_property
    def contexts(self) -> torch.Tensor:
        """`[C]`: the tokens of each prompt before its new ones."""
        return (self.lengths - self.counts)[self.decodes :]

    def count_segments(self, most: int) -> int:
        """Into how many segments of so many tokens these are cut."""
        return -(-int(self.contexts.sum()) // most)

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

    @cached_property
    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt of each token, and its position there, int64 each. Waits for a GPU, once for
        all layers."""
        bounds = self.bounds.long()
        prompt = torch.repeat_interleave(bounds.diff())
        position = self.firsts[prompt] + torch.arange(len(prompt), device=prompt.device)
        position = position - bounds[prompt]
        return prompt, position + self.gaps[prompt] * (position >= self.jumps[prompt])


@dataclass(frozen=True)
class Exact:
    """What some prompts of a step read exact: the windows before their new tokens, and these."""

    page_table: torch.Tensor
    """Their rows of the step's, int64 `[C, N]`."""
    contexts: torch.Tensor
    """int32 `[C]`: how many tokens each has before its new ones."""
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
    bounds: torch.Tensor
    """int32 `[C + 1]`: where the new tokens of each begin, counted from the first of these."""
    longest: int
    """No request has more new tokens."""
    exact: Sequence[Exact]
    """Together, all prompts; none where the only one has no token before its new ones."""
    codes: Sequence[Segment]
    """All other tokens."""


@dataclass(frozen=True)
class Reads:
    """From where to where C prompts read what, int32 on the device, in S segments."""

    contexts: torch.Tensor
    """`[C]`: how many tokens are before the new ones."""
    firsts: torch.Tensor
    """`[C]`: how many of these, the first ones, are read exact."""
    gaps: torch.Tensor
    """`[C]`: how many of them are read from codes, those that follow. The last ones are exact."""
    new_bounds: torch.Tensor
    """`[C + 1]`: where the new tokens of each begin."""
    exact_bounds: torch.Tensor
    """`[C + 1]`: where all that it reads exact begins."""
    code_bounds: torch.Tensor
    """`[S, C + 1]`: where those of a segment begin that it reads from codes."""
    code_firsts: torch.Tensor
    """`[S, C]`: the first of these."""

    @classmethod
    def allocate(cls, prompts: int, segments: int, device: torch.device) -> "Reads":
        """One to write to."""
        one, ends = (prompts,), (prompts + 1,)
        shapes = one, one, one, ends, ends, (segments, *ends), (segments, *one)
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        return cls(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def find_reads(
    contexts: torch.Tensor,
    starts: torch.Tensor,
    recents: torch.Tensor,
    new: torch.Tensor,
    segments: int,
    most: int,
) -> Reads:
    """What C prompts with so many tokens, `new` ones after them, read: those before `starts` and
    from `recents` on exact, and the others in segments of `most` tokens. All are int32 `[C]`."""
    gaps, begins = recents - starts, contexts.cumsum(0, dtype=torch.int32) - contexts
    edges = torch.arange(segments, device=contexts.device).int()[:, None] * most - begins
    offsets = torch.minimum(edges.clamp(min=0), contexts)
    counts = (torch.minimum(edges + most, gaps) - offsets).clamp(min=0)
    sums = (each.cumsum(-1, dtype=torch.int32) for each in (new, contexts - gaps + new, counts))
    own, exact, codes = (torch.nn.functional.pad(ends, (1, 0)) for ends in sums)
    return Reads(contexts, starts, gaps, own, exact, codes, offsets + starts)


@lru_cache(maxsize=1)  # the pages of all sizes are planned for one step
def _cut(known: Known, windows: int, most: int) -> tuple[list[Any], list[tuple[int, int]]]:
    """Of each group of prompts: which they are, which of the new tokens are theirs, the most of
    these, how many tokens they read exact, and the most of those. Of each segment: how many tokens
    it has at most, and how many of one prompt."""
    new, contexts = known.counts[known.decodes :], known.contexts
    groups, begin = [], 0
    sizes = contexts.clamp(max=windows) + new
    ends, firsts = sizes.cumsum(0), new.cumsum(0) - new
    # One without a context reads its new tokens as they are. Several would not, see `restore.cu`.
    while (known.count_segments(most) or len(sizes) > 1) and begin < len(sizes):
        limit = int(ends[begin] - sizes[begin]) + most
        end = max(begin + 1, int(torch.searchsorted(ends, limit, right=True)))
        part, first = slice(begin, end), int(firsts[begin])
        tokens = slice(first, first + int(new[part].sum()))
        read = int(sizes[part].sum()), int(sizes[part].max())
        groups.append((part, tokens, int(new[part].max()), *read))
        begin = end
    edges = torch.arange(0, int(contexts.sum()), most)[:, None] - (contexts.cumsum(0) - contexts)
    parts = torch.minimum(torch.stack([edges, edges + most]).clamp(min=0), contexts)
    rooms = parts[1] - parts[0]
    return groups, [(int(room.sum()), int(room.max())) for room in rooms]


def plan_prompts(
    known: Known, reads: Reads, page_table: torch.Tensor, windows: int, most: int
) -> Prompts:
    """Group the prompts of a step so that each group reads at most `most` tokens exact, at most
    `windows` of each prompt and the new ones, or is one prompt; and cut all else into segments of
    `most` tokens. Nothing waits for the device, and nothing loops over prompts."""
    groups, rooms = _cut(known, windows, most)
    none, exact, table = torch.zeros_like(reads.firsts), [], page_table[known.decodes :]
    for part, tokens, longest, *room in groups:
        ends = slice(part.start, part.stop + 1)
        bounds, own = reads.exact_bounds[ends], reads.new_bounds[ends]
        if part.start:
            bounds, own = bounds - bounds[0], own - own[0]
        read = Segment(bounds, none[part], reads.firsts[part], reads.gaps[part], *room)
        exact.append(Exact(table[part], reads.contexts[part], tokens, own, longest, read))
    several = zip(reads.code_bounds, reads.code_firsts, rooms, strict=True)
    codes = [Segment(bounds, first, none, none, *room) for bounds, first, room in several]
    longest = int(known.counts[known.decodes :].max())
    return Prompts(known.few_tokens, table, reads.new_bounds, longest, exact, codes)


def move(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers on a device, without waiting for it."""
    if device.type == "cuda":  # from memory that is not pinned, the copy would wait
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
