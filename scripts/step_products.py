"""A decoding step of one request with kernels of its own (`step_products.cu`).

With one row of activations, a matrix product takes as long as its weights take to be read, and a
library's kernels pause between two of them. Both caches get these kernels, so that what is left of
a step beside attention is close to what the weights' bytes allow.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from step_model import EPSILON, Geometry, Layer, LayerCache, Model, angles_of

from rotationzoo.codec import cuda
from rotationzoo.codec.cuda_launch import Launcher

_SOURCE = Path(__file__).with_suffix(".cu")
_WARPS = 8  # of a block of `product`, about
_LONGEST = 2048  # columns that one warp reads of a row; with 4,096 a step took 1.27 times as long
_HEADS_OF_A_BLOCK = 8


class Placed(LayerCache, Protocol):
    """A cache whose memory a kernel may write to."""

    @property
    def both(self) -> torch.Tensor:
        """Keys and values `[2, 1, H, T, D]`."""

    @property
    def position(self) -> torch.Tensor:
        """Where the new token goes, int64 `[1]`."""


class OneRequest:
    """The step of a model for a single request."""

    def __init__(self, model: Model):
        self.model, self.device = model, model.head.device
        geometry = model.geometry
        width = geometry.heads * geometry.dim
        self._normed = Product(geometry, geometry.hidden, self.device, normed=True)
        self._gated = Product(geometry, geometry.hidden, self.device, normed=True, gated=True)
        self._out = Product(geometry, width, self.device)
        self._down = Product(geometry, geometry.intermediate, self.device)
        self._heads = self._normed.program.get_kernel("place_heads")
        self._rows = self._new(geometry.rows * geometry.dim)
        self._query = self._new(1, geometry.heads, 1, geometry.dim)
        self._hidden, self._middle = self._new(2, 1, geometry.hidden)
        self._wide = self._new(geometry.intermediate)
        self._logits = self._new(1, geometry.vocabulary)

    def logits(
        self, tokens: torch.Tensor, position: torch.Tensor, caches: Sequence[Placed]
    ) -> torch.Tensor:
        """As `Model.logits`, `[1, vocabulary]`."""
        model, launch = self.model, Launcher(self.device)
        self._hidden.copy_(model.embedding[tokens])
        angles = angles_of(position, model.geometry.dim)
        for layer, cache in zip(model.layers, caches, strict=True):
            self._add_layer(launch, layer, cache, angles)
        self._normed(launch, model.head, self._hidden, self._logits, norm=model.norm)
        return self._logits

    def _add_layer(
        self, launch: Launcher, layer: Layer, cache: Placed, angles: torch.Tensor
    ) -> None:
        hidden, middle = self._hidden, self._middle
        self._normed(launch, layer.qkv, hidden, self._rows, norm=layer.norms[0])
        grid = -(-self.model.geometry.rows // _HEADS_OF_A_BLOCK), 1, 1
        side, _, head, token, _ = cache.both.stride()
        arguments = self._rows, layer.head_norms, angles, self._query, cache.both, cache.position
        launch(self._heads, grid, 32 * _HEADS_OF_A_BLOCK, (*arguments, side, head, token))
        attended = cache.attend(self._query).contiguous()
        self._out(launch, layer.out, attended, middle, residual=hidden)
        self._gated(launch, layer.gate_up, middle, self._wide, norm=layer.norms[1])
        self._down(launch, layer.down, self._wide, hidden, residual=middle)

    def _new(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)


class Product:
    """The kernel `product` for weights of so many columns."""

    def __init__(
        self,
        geometry: Geometry,
        columns: int,
        device: torch.device,
        normed: bool = False,
        gated: bool = False,
    ):
        segment = next(n for n in range(_LONGEST, 0, -256) if columns % n == 0)
        self.rows = 2 * math.ceil(_WARPS * segment / columns / 2)
        self.threads = 32 * self.rows * (columns // segment)
        self.outputs = self.rows // 2 if gated else self.rows
        macros = {
            "COLUMNS": columns,
            "SEGMENT": segment,
            "ROWS": self.rows,
            "NORM": int(normed),
            "GATED": int(gated),
            "HEADS": geometry.heads,
            "KV_HEADS": geometry.kv_heads,
            "HEAD": geometry.dim,
            "EPSILON": f"{EPSILON}f",
        }
        values = tuple((name, str(value)) for name, value in macros.items())
        self.program = cuda.build(_SOURCE.read_text(), values, device)
        self._kernel = self.program.get_kernel("product")

    def __call__(
        self,
        launch: Launcher,
        weight: torch.Tensor,
        rows: torch.Tensor,
        output: torch.Tensor,
        norm: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Write `residual + weight @ rows` to `output`."""
        count = output.numel()
        assert count % self.outputs == 0
        grid = count // self.outputs, 1, 1
        launch(self._kernel, grid, self.threads, (weight, rows, norm, residual, output, count))
