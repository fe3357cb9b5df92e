"""What the host knows of a step, and what its prompts read. Codes are restored in segments, one at
a time, so that the memory for them does not grow with the context."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

LONG = 32_768  # tokens of a segment on a GPU
SHORT = 4096  # and for torch's attention, which stores a weight for each
DECODE_THRESHOLD = 8
"""The most new tokens of a request that the decoding kernel takes. On an H100, with 4 query heads
per KV head, it needs 0.35 to 0.77 of a prompt's time; for 16 tokens, 0.60 to 1.30."""


@dataclass(frozen=True)
class HostMetadata:
    """What the host knows of a step without waiting for a device: int64 tensors on the CPU."""

    counts: torch.Tensor  # [B]: new tokens of each request; decodes come before prompts
    lengths: torch.Tensor  # [B]: tokens of each request; of decodes, an upper bound
    max_tokens: int  # of any request, at most
    threshold: int = DECODE_THRESHOLD  # requests with more new tokens are prompts
    meets: bool = True  # whether a request may read tokens that another one stores in this step

    @cached_property
    def decodes(self) -> int:
        """How many requests are decodes: they come before the first prompt."""
        prompts = (self.counts > self.threshold).nonzero()
        return int(prompts[0]) if len(prompts) else len(self.counts)

    @cached_property
    def max_new(self) -> int:
        """The most new tokens of these requests."""
        return max(1, int(self.counts[: self.decodes].max())) if self.decodes else 1

    @property
    def decode_tokens(self) -> int:
        return int(self.counts[: self.decodes].sum())

    @property
    def has_prompts(self) -> bool:
        return self.decodes < len(self.counts)

    @cached_property
    def contexts(self) -> torch.Tensor:
        """`[C]`: the tokens of each prompt before its new ones."""
        return (self.lengths - self.counts)[self.decodes :]

    def count_segments(self, most: int) -> int:
        """The number of segments of `most` tokens that the contexts fill."""
        return -(-int(self.contexts.sum()) // most)

    def spread(self, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`DecodeMetadata.spread` for the first requests, which have `tokens` rows."""
        counts, new = self.counts[: self.decodes], self.max_new
        # Requests without tokens pad the batch of a graph.
        if ((counts == new) | (counts == 0)).all() and tokens == len(counts) * new:
            return None
        ends, request = counts.cumsum(0), torch.repeat_interleave(counts)
        rows = (ends[:, None] - new + torch.arange(new)).clamp(min=0).flatten()
        back = torch.arange(len(request)) - ends[request] + (request + 1) * new
        back = torch.nn.functional.pad(back, (0, tokens - len(back)))
        return move(rows, device), move(back, device)


@dataclass(frozen=True)
class Segment:
    """Tokens of C prompts, one prompt after another; a prompt may have none. Token `j` of a prompt
    has the position `first + j`, and `gap` more from the position `jump` on. All are int32."""

    bounds: torch.Tensor  # [C + 1]: where the tokens of each prompt begin
    firsts: torch.Tensor  # [C]
    jumps: torch.Tensor  # [C]
    gaps: torch.Tensor  # [C]
    max_tokens: int
    longest: int  # tokens of one prompt, at most

    @cached_property
    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt and the position of each of `max_tokens` tokens, int64; those after the last
        one may have any. Nothing waits for a GPU."""
        bounds = self.bounds.long()
        token = torch.arange(self.max_tokens, device=bounds.device)
        prompt = torch.searchsorted(bounds[1:-1], token, right=True)
        position = token + (self.firsts - bounds[:-1])[prompt]
        return prompt, position + self.gaps[prompt] * (position >= self.jumps[prompt])


@dataclass(frozen=True)
class Exact:
    """What some prompts of a step read exact: the windows before their new tokens, and these."""

    page_table: torch.Tensor  # int64 [C, N]: their rows of the step's
    contexts: torch.Tensor  # int32 [C]: the tokens of each before its new ones
    tokens: slice  # their part of the new tokens of all prompts
    bounds: torch.Tensor  # int32 [C + 1]: where the new tokens of each begin
    longest: int  # new tokens of one prompt, at most
    read: Segment


@dataclass(frozen=True)
class Prompts:
    """The C requests of a step with many new tokens each. They are its last ones."""

    token: int  # the index of their first new token among those of the step
    page_table: torch.Tensor  # int64 [C, N]: their rows of the step's
    bounds: torch.Tensor  # int32 [C + 1]: where the new tokens of each begin, from `token` on
    longest: int  # new tokens of one request, at most
    exact: Sequence[Exact]  # all prompts; empty for a single one without a context
    codes: Sequence[Segment]  # all other tokens


@dataclass(frozen=True)
class Reads:
    """What C prompts read, in S segments: int32 on the device."""

    contexts: torch.Tensor  # [C]: tokens before the new ones
    firsts: torch.Tensor  # [C]: how many of these, from the first on, are read exact
    gaps: torch.Tensor  # [C]: how many after those are read from codes; the rest is exact
    new_bounds: torch.Tensor  # [C + 1]: where the new tokens of each begin
    exact_bounds: torch.Tensor  # [C + 1]: where the tokens that each reads exact begin
    code_bounds: torch.Tensor  # [S, C + 1]: where those of a segment begin that are codes
    code_firsts: torch.Tensor  # [S, C]: the positions of these

    @classmethod
    def allocate(cls, prompts: int, segments: int, device: torch.device) -> "Reads":
        """Empty tensors, for a kernel to fill."""
        one, ends = (prompts,), (prompts + 1,)
        shapes = one, one, one, ends, ends, (segments, *ends), (segments, *one)
        return cls(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))


def find_reads(
    contexts: torch.Tensor,
    starts: torch.Tensor,
    recents: torch.Tensor,
    new: torch.Tensor,
    segments: int,
    most: int,
) -> Reads:
    """What C prompts read that have `contexts` tokens before `new` ones: exact before `starts` and
    from `recents` on, and the others in segments of `most` tokens. All are int32 `[C]`."""
    gaps, begins = recents - starts, contexts.cumsum(0, dtype=torch.int32) - contexts
    edges = torch.arange(segments, device=contexts.device).int()[:, None] * most - begins
    offsets = torch.minimum(edges.clamp(min=0), contexts)
    counts = (torch.minimum(edges + most, gaps) - offsets).clamp(min=0)
    sums = (each.cumsum(-1, dtype=torch.int32) for each in (new, contexts - gaps + new, counts))
    own, exact, codes = (torch.nn.functional.pad(ends, (1, 0)) for ends in sums)
    return Reads(contexts, starts, gaps, own, exact, codes, offsets + starts)


def _cut(host: HostMetadata, windows: int, most: int) -> tuple[list[Any], list[tuple[int, int]]]:
    """For each group of prompts: its slice of the prompts and of their new tokens, the most new
    tokens of one, and the tokens that all and that one reads exact, at most. For each segment: the
    tokens of all prompts and of one, at most."""
    new, contexts = host.counts[host.decodes :], host.contexts
    groups, begin = [], 0
    sizes = contexts.clamp(max=windows) + new
    ends, firsts = sizes.cumsum(0), new.cumsum(0) - new
    # A single prompt without context reads its new tokens in place; several cannot (`restore.cu`).
    while (host.count_segments(most) or len(sizes) > 1) and begin < len(sizes):
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
    host: HostMetadata, reads: Reads, page_table: torch.Tensor, windows: int, most: int
) -> Prompts:
    """Group the prompts of a step so that a group reads at most `most` tokens exact, or is a single
    prompt; of a prompt, these are the new tokens and at most `windows` others. Cut all else into
    segments of `most` tokens. Nothing waits for the device, and nothing loops over prompts."""
    groups, rooms = _cut(host, windows, most)
    none, exact, table = torch.zeros_like(reads.firsts), [], page_table[host.decodes :]
    for part, tokens, longest, *sizes in groups:
        ends = slice(part.start, part.stop + 1)
        bounds, own = reads.exact_bounds[ends], reads.new_bounds[ends]
        if part.start:
            bounds, own = bounds - bounds[0], own - own[0]
        read = Segment(bounds, none[part], reads.firsts[part], reads.gaps[part], *sizes)
        exact.append(Exact(table[part], reads.contexts[part], tokens, own, longest, read))
    several = zip(reads.code_bounds, reads.code_firsts, rooms, strict=True)
    codes = [Segment(bounds, first, none, none, *sizes) for bounds, first, sizes in several]
    longest = int(host.counts[host.decodes :].max())
    return Prompts(host.decode_tokens, table, reads.new_bounds, longest, exact, codes)


def move(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device without waiting for it."""
    if device.type == "cuda":  # a copy from memory that is not pinned would wait
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
