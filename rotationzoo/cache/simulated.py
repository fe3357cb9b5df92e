"""A model that reads its keys and values from a 2-bit cache, simulated in one forward pass of whole
rows.

A server keeps the first `sink` and the last `recent` tokens of a request exact, so a position is
read exact by some queries and quantized by later ones. The model's own attention function is
therefore called on keys and values `[exact; quantized]` of twice the length, with a mask that shows
each query one of the two copies of each position; block by block of queries, on what these see.
Windows, soft cap and sinks stay the model's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from rotationzoo.codec import int2
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.capture import Attention, intercept
from rotationzoo.model.geometry import Geometry
from rotationzoo.rotations import Rotations

_QUERIES = 512  # of a block


@dataclass(frozen=True)
class Cache:
    """What a server stores exact and how it stores the rest."""

    format: int2.Format = int2.SGLANG
    sink: int = 64
    recent: int = 256
    prefill_chunk: int | None = None
    """Queries of a chunk of so many tokens read the whole chunk exact, and what earlier chunks left
    as `prefill_layout` says; None is decoding, where each query's `recent` tokens end with its
    own."""
    prefill_layout: Literal["server", "window"] = "server"
    """`server`: as OSCAR's fork of SGLang writes chunks (`_mixed_extend_layout_counts`), of which
    all but the last leave nothing exact but the sink; its `recent` tokens are for decoding.
    `window`: the `recent` tokens before a chunk are exact."""

    def exact(self, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Boolean `[T, T]`: whether query t reads position j from the exact copy."""
        position = torch.arange(length, device=device)
        chunk = self.prefill_chunk
        end = position + 1 if chunk is None else position // chunk * chunk
        return (position < self.sink) | (position >= end[:, None] - self._recent)

    @property
    def first_quantized(self) -> int:
        """The first query that reads a quantized position."""
        window = self.sink + self._recent
        return (
            window
            if self.prefill_chunk is None
            else -(-(window + 1) // self.prefill_chunk) * self.prefill_chunk
        )

    @property
    def _recent(self) -> int:
        """Tokens that are exact before those that come together: a query, or its chunk."""
        written_at_once = self.prefill_chunk is not None and self.prefill_layout == "server"
        return 0 if written_at_once else self.recent


@dataclass(frozen=True)
class Arm:
    """The rotations under test, and the group size (None: the whole head)."""

    name: str
    rotations: Rotations
    group_size: int | None = None

    def kept(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` of a layer as the windows keep them: keys without their
        mean, which no server adds again, since a softmax over keys ignores it."""
        mean = self._mean(rows, layer, side)
        return rows if mean is None or side == "value" else (rows.float() - mean).to(rows.dtype)

    def stored(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        """Rows `[B, H, T, D]` as they come back from the 2-bit cache, in their own frame and type:
        keys without their mean, values with theirs, which a server adds to what attention gives."""
        rotation = self.rotations[layer][side]
        mean = self._mean(rows, layer, side)
        centered = rows.float() if mean is None else rows.float() - mean
        back = stored(centered, rotation.matrix, rotation.clip, self.group_size, format)
        if mean is not None and side == "value":
            back = back + mean
        return back.to(rows.dtype)

    def _mean(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor | None:
        """`[H, 1, D]`."""
        mean = self.rotations[layer][side].mean
        return None if mean is None else mean.to(rows.device)[:, None]


def stored(
    rows: torch.Tensor,
    matrix: torch.Tensor,
    clip: torch.Tensor,
    group_size: int | None,
    form: int2.Format,
) -> torch.Tensor:
    """Rows `[B, H, T, D]`, less their mean where they are centred, as they come back from the
    cache, in their own frame.

    `matrix` is `[H, D, D]` and `clip` `[H]`, with or without B, on any device.
    """
    matrix = matrix.to(rows.device)
    return int2.round_trip(rows @ matrix, clip[..., None], group_size, form) @ matrix.mT


Observe = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`(layer, output, exact)`: the attention block's output `[B, T, hidden]` after its projection,
simulated and exact, both from the same input."""
ObserveKL = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`(layer, divergence, positions)`: KL `[B, Q]` of the attention of the queries at these positions,
mean over heads."""


@dataclass
class Simulation:
    """One arm read through one cache. `layers` and `sides` are what is stored in 2 bits; the rest
    stays exact."""

    arm: Arm
    cache: Cache
    geometry: Geometry
    layers: set[int]
    sides: tuple[str, ...] = ("key", "value")
    queries: torch.Tensor | None = None
    """Positions whose attention is compared, `[Q]`; None for no comparison."""
    _masks: list["TwoCopyMask"] = field(default_factory=list)
    _exactly: bool = False

    @contextmanager
    def running(
        self,
        model: PreTrainedModel,
        modules: Mapping[int, torch.nn.Module] | None = None,
        observe: Observe = lambda *_: None,
        observe_kl: ObserveKL = lambda *_: None,
    ) -> Iterator[None]:
        """Within the block the model reads its cache through the codec. `modules` are the attention
        modules by layer, of those whose outputs are to be observed."""
        owners = {layer.index: layer.owner for layer in self.geometry}

        def attention(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attend: Attention,
        ) -> torch.Tensor:
            if self._exactly or layer not in self.layers:
                return attend(query, key, value)
            keys, values = (
                self._both_copies(t, owners[layer], side)
                for t, side in ((key, "key"), (value, "value"))
            )
            mask = self._doubled(attend, query)
            if self.queries is not None:
                observe_kl(
                    layer, self._divergence(attend, query, key, keys, mask.whole), self.queries
                )
            outputs = [
                replace(attend, mask=block.mask)(
                    query[:, :, block.queries], keys[:, :, block.seen], values[:, :, block.seen]
                )
                for block in mask.blocks
            ]
            return torch.cat(outputs, dim=1)

        def compare(layer: int) -> Callable[..., None]:
            def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                self._exactly = True
                try:
                    exact = module.forward(*args, **kwargs)
                finally:
                    self._exactly = False
                observe(
                    layer,
                    *(
                        result[0] if isinstance(result, tuple) else result
                        for result in (output, exact)
                    ),
                )

            return hook

        hooks = [
            module.register_forward_hook(compare(layer), with_kwargs=True)
            for layer, module in (modules or {}).items()
            if layer in self.layers
        ]
        try:
            with intercept(model, attention):
                yield
        finally:
            self._masks.clear()
            for hook in hooks:
                hook.remove()

    def _both_copies(self, rows: torch.Tensor, owner: int, side: str) -> torch.Tensor:
        if side not in self.sides:
            return torch.cat([rows, rows], dim=2)
        exact = self.arm.kept(rows, owner, side)
        return torch.cat([exact, self.arm.stored(rows, owner, side, self.cache.format)], dim=2)

    def _doubled(self, attend: Attention, query: torch.Tensor) -> "TwoCopyMask":
        """The model's own mask for `[exact; quantized]`, made once for all layers on a device that
        have the same."""
        for known in self._masks:
            if (
                known.device == query.device
                and known.length == query.shape[2]
                and _same(known.mask, attend.mask)
            ):
                return known
        whole = two_copy_mask(attend, query, self.cache)
        self._masks.append(
            TwoCopyMask(attend.mask, query.device, query.shape[2], whole, blocks_of(whole))
        )
        return self._masks[-1]

    def _divergence(
        self,
        attend: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        keys: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """KL of the sampled queries' attention to that over exact keys, mean over heads, `[B, Q]`.
        Where a model's sinks take part of the attention, that part counts as one more position."""
        assert self.queries is not None
        at = self.queries.to(query.device)
        length = key.shape[2]
        mask = additive(mask[:, :, at], torch.float32)
        exact_mask = torch.maximum(mask[..., :length], mask[..., length:])
        query = query[:, :, at]
        p = replace(attend, mask=exact_mask).weights(query, key)
        q = replace(attend, mask=mask).weights(query, keys)
        return divergence(p.double(), (q[..., :length] + q[..., length:]).double()).mean(1)


def two_copy_mask(attend: Attention, query: torch.Tensor, cache: Cache) -> torch.Tensor:
    """The mask `[B or 1, 1, T, 2T]` that shows each query one copy of each position that the model
    shows it, boolean or additive as the model's own. Raises `UnsupportedModel` for masks of another
    kind."""
    length, mask = query.shape[2], attend.mask
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.ndim != 4 or mask.shape[-2:] != (length, length):
        raise UnsupportedModel(
            f"{type(attend.module).__name__} masks its attention in a way that cannot show it a second copy of its cache"
        )
    exact = cache.exact(length, query.device)
    if mask.dtype == torch.bool:
        return torch.cat([mask & exact, mask & ~exact], dim=-1)
    hidden = torch.finfo(mask.dtype).min
    return torch.cat([mask.masked_fill(~exact, hidden), mask.masked_fill(exact, hidden)], dim=-1)


def _same(mask: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """By content: layers on a second device are each handed a copy of their own."""
    if mask is None or other is None or mask is other:
        return mask is other
    return (mask.device, mask.dtype) == (other.device, other.dtype) and torch.equal(mask, other)


@dataclass(frozen=True)
class TwoCopyMask:
    """A model's own `mask` for rows of `length` tokens on a device (None: plain causal), and the
    mask that shows each query one copy of each position, `[B or 1, 1, T, 2T]`, with its blocks."""

    mask: torch.Tensor | None
    device: torch.device
    length: int
    whole: torch.Tensor
    blocks: list["Block"]


@dataclass(frozen=True)
class Block:
    """Queries that read together, the positions of `[exact; quantized]` that any of them sees, and
    the mask between them."""

    queries: slice
    seen: torch.Tensor
    mask: torch.Tensor


def blocks_of(mask: torch.Tensor) -> list[Block]:
    """A mask `[B or 1, 1, T, 2T]` in blocks of queries. Most of it is hidden from all of a block:
    what comes later, and one copy or the other of nearly all else."""
    found = []
    for start in range(0, mask.shape[2], _QUERIES):
        queries = slice(start, start + _QUERIES)
        part = mask[:, :, queries]
        visible = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min
        seen = visible.flatten(0, 2).any(0).nonzero()[:, 0]
        found.append(Block(queries, seen, part[..., seen]))
    return found


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask (True = attend) as numbers to add to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        ~mask, torch.finfo(dtype).min
    )


def divergence(exact: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """KL `[...]` in nats of two attentions `[..., T]`. What the model's sinks took counts as one
    more position."""
    p, q = _with_rest(exact), _with_rest(attention)
    return (torch.xlogy(p, p) - p * q.clamp(min=1e-30).log()).sum(-1)


def _with_rest(weights: torch.Tensor) -> torch.Tensor:
    """With the rest to 1 as one more position; what rounding leaves of a softmax is nothing."""
    rest = 1 - weights.sum(-1, keepdim=True)
    return torch.cat([weights, rest.where(rest > 1e-5, 0)], dim=-1)
