"""What the new tokens of prompts read: each other and the windows before them exact, and all else
from codes, which are dequantized and not rotated back. Instead, queries are rotated to the frame of
the codes, and what they read is rotated back once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from rotationzoo.codec.attention import Scores, attend_rows
from rotationzoo.vllm.segments import FEW, Segment
from rotationzoo.vllm.steps import Step

Scratch = Callable[..., list[torch.Tensor]]
"""Takes shapes and types, and returns a tensor for each, which holds until the next call."""


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
        `causal`: there are as many keys as queries, and each reads those up to itself."""

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
            for at in range(begin, end, self.queries):
                part = slice(at, min(at + self.queries, end))
                own = torch.arange(part.start - begin, part.stop - begin, device=query.device)
                reads = position <= own[:, None] if causal else position[None] >= 0 * own[:, None]
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

    def to_codes(self, query: torch.Tensor, output: torch.Tensor) -> torch.Tensor: ...

    def from_codes(self, read: torch.Tensor, output: torch.Tensor) -> torch.Tensor: ...

    def restore(
        self, step: Step, segment: Segment, side: str, into: torch.Tensor
    ) -> torch.Tensor: ...


def attend_prompts(  # noqa: PLR0913 (a step, its rows, and what computes with them)
    layer: Layer,
    step: Step,
    query: torch.Tensor,
    rows: dict[str, torch.Tensor],
    scores: Scores,
    output: torch.Tensor,
    attention: Attention,
    scratch: Scratch,
) -> None:
    """Write to `output` `[T, H_q, D]` what the queries `[T, H_q, D]` of a step's prompts read. The
    keys and values of their new tokens are `rows` `[T, H, D]`."""
    prompts = step.prompts
    assert prompts is not None
    own = Packed(prompts.bounds, prompts.longest)
    keys = layer.exact_keys(rows["key"])
    if not prompts.segments:
        attention.attend(query, own, keys, rows["value"], own, scores, True, output)
        return
    sizes = scratch_sizes(query.shape, rows["key"].shape[1], query.dtype, attention)
    *free, restored_keys, restored_values = scratch(*sizes)

    def merge(first: Read | None, second: Read) -> Read:
        if first is None:
            return second
        merged = attention.merge(first, second, free.pop())
        free.extend((first.output, second.output))
        return merged

    # Attention sinks take part once.
    others = Scores(scores.scale, scores.soft_cap)
    exact: Read | None = attention.attend(
        query, own, keys, rows["value"], own, scores, True, free.pop()
    )
    codes: Read | None = None
    turned = layer.to_codes(query, free.pop())
    for segment in prompts.segments:
        read_keys = layer.restore(step, segment, "key", restored_keys)
        read_values = layer.restore(step, segment, "value", restored_values)
        earlier = Packed(segment.bounds, segment.longest)
        queries = query if segment.is_exact else turned
        read = attention.attend(
            queries, own, read_keys, read_values, earlier, others, False, free.pop()
        )
        if segment.is_exact:
            exact = merge(exact, read)
        else:
            codes = merge(codes, read)
    assert exact is not None
    assert codes is not None
    free.append(turned)
    attention.merge(exact, Read(layer.from_codes(codes.output, free.pop()), codes.totals), output)


def scratch_sizes(
    queries: tuple[int, ...], heads: int, dtype: torch.dtype, attention: Attention
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What `attend_prompts` takes of its scratch memory for so many queries `[T, H_q, D]`: their
    copies, and the keys and the values of a segment."""
    restored = attention.segment, heads, queries[-1]
    return [(tuple(queries), dtype)] * 5 + [(restored, dtype)] * 2


def new_scratch(
    device: torch.device, *sizes: tuple[tuple[int, ...], torch.dtype]
) -> list[torch.Tensor]:
    """New memory, where nobody lends any."""
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]


def _ranges(bounds: torch.Tensor) -> list[tuple[int, int]]:
    numbers = bounds.tolist()
    return [*pairwise(numbers)]
