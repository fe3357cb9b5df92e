"""What the new tokens of prompts read: each other and the windows before them exact, and all else
from codes, which are dequantized and not rotated back. Instead, queries are rotated to the frame of
the codes, and what they read is rotated back once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from rotationzoo.codec.attention import Scores, attend_rows
from rotationzoo.vllm.segments import FEW, Exact, Segment
from rotationzoo.vllm.steps import Step

Scratch = Callable[..., list[torch.Tensor]]
"""Takes shapes and types, and returns a tensor for each, which holds until the next call."""


Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Read:
    """What queries have read from some tokens."""

    output: torch.Tensor
    """`[T, H_q, D]`."""
    totals: torch.Tensor
    """float32 `[H_q, T]`: the log-sum-exp of the logits."""


@dataclass(frozen=True)
class Packed:
    """Rows of C prompts, one prompt after another."""

    bounds: torch.Tensor
    """int32 `[C + 1]`: where those of each begin."""
    longest: int
    """No prompt has more."""


class Attention(Protocol):
    """How queries of C prompts read keys and values of C prompts."""

    segment: int
    """So many tokens are read at a time."""

    def attend(  # noqa: PLR0913 (two sides of rows, as vLLM's function has them)
        self,
        query: torch.Tensor,
        of_queries: Packed,
        key: torch.Tensor,
        value: torch.Tensor,
        of_keys: Packed,
        scores: Scores,
        causal: bool,
        output: torch.Tensor,
    ) -> Read:
        """Let the queries `[T, H_q, D]` of each prompt read its keys and values `[L, H, D]`, and
        write to `output` `[T, H_q, D]`. A query that reads nothing gets zeros and minus infinity.
        `causal`: the queries are those of the last keys, and each reads the keys up to its own."""

    def merge(self, first: Read, second: Read, output: torch.Tensor) -> Read:
        """What queries read from both, in `output`."""


class TorchAttention:
    """The definition, in plain torch: it takes prompts one by one, and waits for a GPU."""

    segment = FEW
    queries = 512
    """So many queries write down their weights at a time."""

    def attend(  # noqa: PLR0913 (as in `Attention`)
        self,
        query: torch.Tensor,
        of_queries: Packed,
        key: torch.Tensor,
        value: torch.Tensor,
        of_keys: Packed,
        scores: Scores,
        causal: bool,
        output: torch.Tensor,
    ) -> Read:
        """As in `Attention`."""
        totals = output.new_empty(output.shape[1::-1], dtype=torch.float32)
        limits = zip(_ranges(of_queries.bounds), _ranges(of_keys.bounds), strict=True)
        for (begin, end), (first, last) in limits:
            keys, values = (rows[first:last].transpose(0, 1)[None] for rows in (key, value))
            position = torch.arange(last - first, device=query.device)
            before = last - first - (end - begin) if causal else last - first
            for at in range(begin, end, self.queries):
                part = slice(at, min(at + self.queries, end))
                own = torch.arange(part.start - begin, part.stop - begin, device=query.device)
                reads = position <= before + own[:, None]
                rows = query[part].transpose(0, 1)[None]
                read, total = attend_rows(rows, keys, values, reads[None], scores)
                output[part], totals[:, part] = read[0].transpose(0, 1), total[0]
        return Read(output, totals)

    def merge(self, first: Read, second: Read, output: torch.Tensor) -> Read:
        """As in `Attention`."""
        totals = torch.logaddexp(first.totals, second.totals)
        output.zero_()
        for part in (first, second):
            weights = (part.totals - totals).exp().nan_to_num(0).T[..., None]  # of nothing: 0
            output.add_(part.output * weights)
        return Read(output, totals)


class Layer(Protocol):
    """The pages of a layer, as far as prompts read them: see `pages.LayerPages`."""

    def exact_keys(self, rows: torch.Tensor) -> torch.Tensor: ...

    def gather(
        self, step: Step, exact: Exact, rows: Rows, into: Sequence[torch.Tensor]
    ) -> None: ...

    def restore(self, step: Step, segment: Segment, into: Sequence[torch.Tensor]) -> None: ...

    def to_codes(self, query: torch.Tensor, output: torch.Tensor) -> torch.Tensor: ...

    def from_codes(self, read: torch.Tensor, output: torch.Tensor) -> torch.Tensor: ...


def attend_prompts(  # noqa: PLR0913 (a step, its rows, and what computes with them)
    layer: Layer,
    step: Step,
    query: torch.Tensor,
    rows: Rows,
    scores: Scores,
    output: torch.Tensor,
    attention: Attention,
    scratch: Scratch,
) -> None:
    """Write to `output` `[T, H_q, D]` what the queries `[T, H_q, D]` of a step's prompts read. The
    keys and values of their new tokens are `rows` `[T, H, D]`."""
    prompts = step.prompts
    assert prompts is not None
    new = Packed(prompts.bounds, prompts.longest)
    if not prompts.exact:
        keys = layer.exact_keys(rows["key"])
        attention.attend(query, new, keys, rows["value"], new, scores, True, output)
        return
    room = max(attention.segment, *(group.read.room for group in prompts.exact))
    *free, keys, values = scratch(
        *scratch_sizes(query.shape, rows["key"].shape[1], room, query.dtype)
    )

    def merge(first: Read, second: Read, output: torch.Tensor) -> Read:
        merged = attention.merge(first, second, output)
        free.extend((first.output, second.output))
        return merged

    into, totals = free.pop(), []
    for group in prompts.exact:
        layer.gather(step, group, rows, (keys, values))
        own, read = Packed(group.bounds, group.longest), _packed(group.read)
        part = query[group.tokens], own, keys, values, read, scores, True, into[group.tokens]
        totals.append(attention.attend(*part).totals)
    exact = Read(into, totals[0] if len(totals) == 1 else torch.cat(totals, 1))

    # Attention sinks take part once.
    scores = Scores(scores.scale, scores.soft_cap)
    codes, turned = None, layer.to_codes(query, free.pop())
    for segment in prompts.codes:
        layer.restore(step, segment, (keys, values))
        read = _packed(segment)
        more = attention.attend(turned, new, keys, values, read, scores, False, free.pop())
        codes = more if codes is None else merge(codes, more, free.pop())
    assert codes is not None
    restored = Read(layer.from_codes(codes.output, free.pop()), codes.totals)
    merge(exact, restored, output)


def _packed(segment: Segment) -> Packed:
    return Packed(segment.bounds, segment.longest)


def scratch_sizes(
    queries: Sequence[int], heads: int, room: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What `attend_prompts` takes of its scratch memory for queries `[T, H_q, D]`: their copies,
    and `room` keys and values."""
    return [((*queries,), dtype)] * 5 + [((room, heads, queries[-1]), dtype)] * 2


def new_scratch(
    device: torch.device, *sizes: tuple[tuple[int, ...], torch.dtype]
) -> list[torch.Tensor]:
    """New memory, where nobody lends any."""
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]


def _ranges(bounds: torch.Tensor) -> list[tuple[int, int]]:
    numbers = bounds.tolist()
    return [*pairwise(numbers)]
