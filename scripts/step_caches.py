"""Caches of all layers for a decoding step: bfloat16 in memory of a fixed size, and 2 bits."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from decode_arms import SPLITS, Arm, exact_arms
from decode_caches import PackedCache, Shape, Storage, exact_caches, packed_caches
from decode_timing import Launch, measure

from rotationzoo.codec import cuda, cuda_encoder
from rotationzoo.codec.attention import ExactWindow, PackedSide, Scores
from rotationzoo.codec.formats import FORMATS

FLUSHED = 64
"""Tokens that are quantized together. The tail holds so many more than the recent window, less the
ones that have not come yet: half of them in the step that is timed."""
CLIP = 0.96


@dataclass(frozen=True)
class ExactLayer:
    """A layer's keys and values in bfloat16, with the new token at the end."""

    both: torch.Tensor
    """`[2, B, H, T, D]`"""
    position: torch.Tensor
    arm: Arm

    def write(self, rows: torch.Tensor) -> None:
        self.both.index_copy_(3, self.position, rows)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        return self.arm.read(query, self.both[0], self.both[1])


@dataclass(frozen=True)
class PackedLayer:
    """A layer's keys and values in 2 bits, with the new token in the tail."""

    cache: PackedCache
    both: torch.Tensor
    """Keys and values of the tail, `[2, B, H, E, D]`"""
    position: torch.Tensor
    kernel: Callable[..., torch.Tensor]

    def write(self, rows: torch.Tensor) -> None:
        self.both.index_copy_(3, self.position, rows)

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        cache, scores = self.cache, Scores(query.shape[-1] ** -0.5)
        return self.kernel(query, cache.packed, cache.head, cache.tail, scores)


def exact_layers(
    shape: Shape, layers: int, sglang: ModuleType | None, device: str = "cuda"
) -> tuple[list[ExactLayer], str]:
    """Caches of `shape.context` tokens, the new one included, with the kernel that is fastest for
    them, and its name and time."""
    memory = exact_caches(shape, layers, device)
    arms = list(exact_arms(shape, sglang, SPLITS))
    times = [_time_of(arm, memory, shape) for arm in arms]
    seconds, number = min((seconds, number) for number, seconds in enumerate(times))
    best = arms[number]
    position = torch.tensor([shape.context - 1], device=device)
    cached = [ExactLayer(_both(part, best, shape), position, best) for part in memory]
    return cached, f"{best.name}, {best.variant}, {1e6 * seconds:.0f} µs a layer"


def _both(memory: torch.Tensor, arm: Arm, shape: Shape) -> torch.Tensor:
    """Keys and values `[2, B, H, T, D]` in the order in which the kernel wants them."""
    # Both sides follow each other, as the requests of one batch of twice the size would.
    twice = replace(shape, batch=2 * shape.batch)
    both: torch.Tensor = arm.view(memory.flatten(), twice).unflatten(0, (2, shape.batch))
    return both


def _time_of(arm: Arm, memory: torch.Tensor, shape: Shape) -> float:
    """Seconds of a layer's attention; infinite for a kernel that does not run."""
    size = shape.batch, shape.heads, 1, shape.dim
    query = torch.randn(size, dtype=torch.bfloat16, device=memory.device)
    both = [_both(part, arm, shape) for part in memory]
    launches: list[Launch] = [
        lambda key=key, value=value: arm.read(query, key, value)  # type: ignore[misc]
        for key, value in both
    ]
    try:
        return measure(launches).median
    except Exception as error:  # of libraries that have their own
        print(f"{arm.name}, {arm.variant}: {(str(error).splitlines() or [''])[0]}")
        return math.inf


class PackedLayers:
    """The 2-bit caches of all layers, of which the tails lie side by side.

    A step puts its token into the tail, at a place that is read on the device. Every 64 steps, the
    64 oldest tokens of all layers' tails are quantized together, outside the graph of a step.
    """

    def __init__(
        self,
        shape: Shape,
        layers: int,
        kernel: Callable[..., torch.Tensor],
        storage: Storage,
        device: str = "cuda",
    ):
        self.format, self.recent = FORMATS[storage.format], storage.recent
        caches = packed_caches(shape, storage, layers, device, spare=FLUSHED)
        size = layers, 2, shape.batch, shape.kv_heads, storage.recent + FLUSHED, shape.dim
        self.tails = torch.randn(size, dtype=torch.bfloat16, device=device)
        filled = caches[0].tail.lengths
        assert filled is not None
        self.packed, self.filled = caches[0].packed.lengths, filled  # the layers share both
        # As many tokens as on average wait for the next flush.
        self.filled.fill_(storage.recent + FLUSHED // 2)
        self.packed.sub_(FLUSHED // 2)
        self.position = self.filled[:1].long() - 1
        self.length = shape.context - storage.exact - FLUSHED // 2
        self.layers = []
        for cache, both in zip(caches, self.tails, strict=True):
            tail = ExactWindow(both[0], both[1], self.filled)
            cached = replace(cache, tail=tail)
            self.layers.append(PackedLayer(cached, both, self.position, kernel))
        sides = [(cache.packed.key, cache.packed.value) for cache in caches]
        self.keys, self.values = zip(*sides, strict=True)

    def flush(self, quantize: Callable[..., cuda.Packed] = cuda_encoder.quantize) -> None:
        """Quantize the oldest tokens of every tail, and move the others to its beginning. The
        lengths change on the device alone."""
        start = self.length // FLUSHED * FLUSHED  # a flush never crosses the end of a page
        for number, sides in enumerate((self.keys, self.values)):
            # Rows [L, B, H, T, D]; all layers are quantized by one launch.
            rows = self.tails[:, number, :, :, :FLUSHED].float()
            rotations = torch.stack([side.matrix.mT for side in sides])
            rotated = rows @ rotations[:, None]
            stored = quantize(rotated.view(1, -1, rows.shape[-1]), CLIP, format=self.format)
            codes = stored.codes.view(*rows.shape[:-1], -1)
            metadata = stored.metadata.view(*rows.shape[:-1], -1, 2)
            for layer, side in enumerate(sides):
                _store(side, start, codes[layer], metadata[layer])
        for tail in self.tails:
            tail[..., : self.recent, :] = tail[..., FLUSHED:, :].clone()
        self.packed.add_(FLUSHED)
        self.filled.sub_(FLUSHED)
        self.position.sub_(FLUSHED)

    def undo(self) -> None:
        """Set the lengths back, so that the same flush can be timed again."""
        self.packed.sub_(FLUSHED)
        self.filled.add_(FLUSHED)
        self.position.add_(FLUSHED)


def request_bytes(shape: Shape, storage: Storage) -> int:
    """Bytes of a layer that one more request of a batch takes in `PackedLayers`, with what a flush
    needs and with pages that are not full."""
    extra = 2 * (storage.recent + FLUSHED) + storage.page
    return storage.bytes(replace(shape, batch=1)) + extra * shape.token_bytes


def _store(side: PackedSide, start: int, codes: torch.Tensor, metadata: torch.Tensor) -> None:
    """Put rows `[B, H, T, ...]` into the page of token `start`."""
    page, place = divmod(start, side.layout.tokens)
    sections = side.layout.view(side.blocks[page])
    part = slice(place, place + codes.shape[2])
    sections.codes[:, :, part] = codes
    sections.scale[:, :, part] = metadata[..., 0]
    sections.offset[:, :, part] = metadata[..., 1]


def free() -> None:
    """Give memory back that nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
