"""What the new tokens of prompts read: each other and the windows before them exact, and all else
from codes, which are dequantized and not rotated back. Instead, queries are rotated to the frame of
the codes, and what they read is rotated back once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from rotationzoo.codec.attention import Scores, attend_rows
from rotationzoo.vllm.segments import FEW
from rotationzoo.vllm.steps import Step

if TYPE_CHECKING:
    from rotationzoo.vllm.pages import LayerPages

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

    rows: Sequence[torch.Tensor]
    """Queries `[T, H_q, D]`, or keys and values, `[L, H, D]` each. Further ones may follow."""
    bounds: torch.Tensor
    """int32 `[C + 1]`: where those of each begin."""
    longest: int
    """No prompt has more."""


class Attention(Protocol):
    """How queries of C prompts read keys and values of C prompts."""

    segment: int
    """So many tokens are read at a time."""

    def attend(
        self, queries: Packed, read: Packed, scores: Scores, causal: bool, output: torch.Tensor
    ) -> Read:
        """Let the queries of each prompt read its keys and values, and write to `output`
        `[T, H_q, D]`. A query that reads nothing gets zeros and minus infinity. `causal`: the
        queries are those of the last keys, and each reads the keys up to its own."""

    def merge(self, first: Read, second: Read, output: torch.Tensor) -> Read:
        """What queries read from both, in `output`."""


class TorchAttention:
    """The definition, in plain torch: it takes prompts one by one, and waits for a GPU."""

    segment = FEW
    queries = 512
    """So many queries write down their weights at a time."""

    def attend(
        self, queries: Packed, read: Packed, scores: Scores, causal: bool, output: torch.Tensor
    ) -> Read:
        """As in `Attention`."""
        totals = output.new_empty(output.shape[1::-1], dtype=torch.float32)
        limits = zip(_ranges(queries.bounds), _ranges(read.bounds), strict=True)
        for (begin, end), (first, last) in limits:
            keys, values = (rows[first:last].transpose(0, 1)[None] for rows in read.rows)
            position = torch.arange(last - first, device=output.device)
            before = last - first - (end - begin) if causal else last - first
            for at in range(begin, end, self.queries):
                part = slice(at, min(at + self.queries, end))
                own = torch.arange(part.start - begin, part.stop - begin, device=output.device)
                mask = position <= before + own[:, None]
                query = queries.rows[0][part].transpose(0, 1)[None]
                result, total = attend_rows(query, keys, values, mask[None], scores)
                output[part], totals[:, part] = result[0].transpose(0, 1), total[0]
        return Read(output, totals)

    def merge(self, first: Read, second: Read, output: torch.Tensor) -> Read:
        """As in `Attention`."""
        totals = torch.logaddexp(first.totals, second.totals)
        output.zero_()
        for part in (first, second):
            weights = (part.totals - totals).exp().nan_to_num(0).T[..., None]  # of nothing: 0
            output.add_(part.output * weights)
        return Read(output, totals)


def attend_prompts(  # noqa: PLR0913 (a step, its rows, and what computes with them)
    layer: "LayerPages",
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
    new = prompts.bounds, prompts.longest
    if not prompts.exact:
        read = Packed((layer.exact_keys(rows["key"]), rows["value"]), *new)
        attention.attend(Packed((query,), *new), read, scores, True, output)
        return
    room = max(attention.segment, *(group.read.room for group in prompts.exact))
    sizes = scratch_sizes(query.shape, rows["key"].shape[1], room, query.dtype)
    *free, keys, values = scratch(*sizes)
    both = keys, values

    def merge(first: Read, second: Read, output: torch.Tensor) -> Read:
        merged = attention.merge(first, second, output)
        free.extend((first.output, second.output))
        return merged

    into, totals = free.pop(), []
    for group in prompts.exact:
        layer.gather(step, group, rows, both)
        own = Packed((query[group.tokens],), group.bounds, group.longest)
        read = Packed(both, group.read.bounds, group.read.longest)
        totals.append(attention.attend(own, read, scores, True, into[group.tokens]).totals)
    exact = Read(into, totals[0] if len(totals) == 1 else torch.cat(totals, 1))

    # Attention sinks take part once.
    scores = Scores(scores.scale, scores.soft_cap)
    codes, turned = None, layer.to_codes(query, free.pop())
    for segment in prompts.codes:
        layer.restore(step, segment, both)
        read = Packed(both, segment.bounds, segment.longest)
        more = attention.attend(Packed((turned,), *new), read, scores, False, free.pop())
        codes = more if codes is None else merge(codes, more, free.pop())
    assert codes is not None
    restored = Read(layer.from_codes(codes.output, free.pop()), codes.totals)
    merge(exact, restored, output)


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
