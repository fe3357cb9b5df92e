"""A decoding step of a dense transformer with random weights, in plain torch."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import linear, silu

# Three small kernels do not need a pool of compilers, which takes longer to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
EPSILON, _THETA = 1e-6, 1e6  # of RMSNorm and of RoPE


@dataclass(frozen=True)
class Geometry:
    """By default that of Qwen3-8B."""

    layers: int = 36
    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocabulary: int = 151_936

    @property
    def rows(self) -> int:
        """Heads of queries, keys and values together."""
        return self.heads + 2 * self.kv_heads


class LayerCache(Protocol):
    """Where a layer puts the new token's keys and values, and what reads all of them."""

    def write(self, rows: torch.Tensor) -> None:
        """Store keys and values `[2, B, H, 1, D]` of the new tokens."""

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """The output of queries `[B, H_q, 1, D]`, of their shape."""


class Layer:
    """The weights of a layer, those with the same input side by side, as servers have them."""

    def __init__(self, geometry: Geometry, device: str):
        hidden, width = geometry.hidden, geometry.heads * geometry.dim
        self.qkv = new_weight(geometry.rows * geometry.dim, hidden, device)
        self.out = new_weight(hidden, width, device)
        self.gate_up = new_weight(2 * geometry.intermediate, hidden, device)
        self.down = new_weight(hidden, geometry.intermediate, device)
        self.norms = torch.ones(2, hidden, dtype=torch.bfloat16, device=device)
        self.head_norms = torch.ones(2, geometry.dim, dtype=torch.bfloat16, device=device)

    @property
    def bytes(self) -> int:
        return sum(size_of(tensor) for tensor in vars(self).values())


class Model:
    """Embedding, layers, final norm and output head."""

    def __init__(self, geometry: Geometry, device: str, fuse: bool = True):
        self.geometry = geometry
        self.layers = [Layer(geometry, device) for _ in range(geometry.layers)]
        self.embedding = new_weight(geometry.vocabulary, geometry.hidden, device)
        self.norm = torch.ones(geometry.hidden, dtype=torch.bfloat16, device=device)
        self.head = new_weight(geometry.vocabulary, geometry.hidden, device)
        self.add_norm = Fused(add_norm, fuse)
        self.prepare = Fused(prepare, fuse)
        self.gated = Fused(gated, fuse)

    @property
    def bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding."""
        return sum(layer.bytes for layer in self.layers) + size_of(self.norm) + size_of(self.head)

    def logits(
        self, tokens: torch.Tensor, position: torch.Tensor, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Logits `[B, vocabulary]` of what follows `tokens` `[B]`, which are at `position`
        `[1]`."""
        hidden = self.embedding[tokens]
        change = torch.zeros_like(hidden)
        angles = angles_of(position, self.geometry.dim)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden, normed = self.add_norm(hidden, change, layer.norms[0])
            rows = linear(normed, layer.qkv).view(len(tokens), self.geometry.rows, -1)
            query, new = self.prepare(rows, layer.head_norms, angles, self.geometry.heads)
            cache.write(new)
            change = linear(cache.attend(query).flatten(1), layer.out)
            hidden, normed = self.add_norm(hidden, change, layer.norms[1])
            change = linear(self.gated(linear(normed, layer.gate_up)), layer.down)
        _, normed = self.add_norm(hidden, change, self.norm)
        return linear(normed, self.head)


class Fused:
    """An elementwise function, compiled by torch where that works."""

    def __init__(self, function: Callable[..., Any], fuse: bool):
        self.plain = function
        self.function = torch.compile(function, dynamic=False) if fuse else function

    def __call__(self, *arguments: object) -> Any:
        try:
            return self.function(*arguments)
        except Exception as error:  # of the compiler, which has many
            if self.function is self.plain:
                raise
            line = (str(error).splitlines() or [""])[0]
            print(f"{self.plain.__name__} is not compiled: {type(error).__name__}: {line}")
            self.function = self.plain
            return self.plain(*arguments)


def new_weight(rows: int, columns: int, device: str) -> torch.Tensor:
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
    return weight.normal_(std=1 / math.sqrt(columns))


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def angles_of(position: torch.Tensor, dim: int) -> torch.Tensor:
    """Cosines and sines `[2, D / 2]` of RoPE."""
    exponents = torch.arange(0, dim, 2, device=position.device) / dim
    angles = position.float() * _THETA**-exponents
    return torch.stack([angles.cos(), angles.sin()])


def normalize(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = rows.float()
    return rows * (rows.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.float()


def add_norm(
    hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream with a change, and its RMSNorm."""
    hidden = hidden + change
    return hidden, normalize(hidden, weight).to(hidden.dtype)


def prepare(
    rows: torch.Tensor, norms: torch.Tensor, angles: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[B, H_q, 1, D]` and keys and values `[2, B, H, 1, D]` of rows `[B, H_q + 2 H, D]`,
    with norms and RoPE."""
    key_heads = (rows.shape[1] - heads) // 2
    query = rotate(normalize(rows[:, :heads], norms[0]), angles).to(rows.dtype)
    key = rotate(normalize(rows[:, heads : heads + key_heads], norms[1]), angles).to(rows.dtype)
    return query.unsqueeze(2), torch.stack([key, rows[:, heads + key_heads :]]).unsqueeze(3)


def rotate(rows: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, -1)
    cosine, sine = angles[0], angles[1]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return silu(gate) * up
