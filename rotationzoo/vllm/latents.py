"""The pages of a layer that caches latents (MLA), and attention over them, in plain torch.

Queries read one head: its key is the latent followed by the key with RoPE, and its value is the
latent. A page has the codes of its latents, then the exact keys with RoPE. Copies are of whole
keys: values are their first channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from rotationzoo.codec import cuda_latents, int2
from rotationzoo.codec.attention import PackedSide, PackedTokens, Scores
from rotationzoo.codec.cuda import Launcher
from rotationzoo.codec.cuda_encoder import kernels_run_on
from rotationzoo.codec.cuda_latents import Frame
from rotationzoo.codec.kernels import parameters
from rotationzoo.rotations import SIDES
from rotationzoo.sides import LATENT, LATENTS
from rotationzoo.vllm.pages import LayerPages, PageBlocks, Rows, Windows, store_kernel
from rotationzoo.vllm.prompts import LayerReader, Lend, TorchAttention
from rotationzoo.vllm.segments import Exact, Segment
from rotationzoo.vllm.steps import DecodeMetadata, Step

ROPE = LATENTS.beside[0]
_FEW = 500  # tokens that are stored without a second stream; 200 were measured


@dataclass(frozen=True)
class LatentKeys(PackedSide):
    """Packed latents, followed by exact keys with RoPE."""

    rope: Callable[[], Sequence[torch.Tensor]] = tuple  # reads [B, 1, P, rope channels] of blocks

    def restore(self) -> torch.Tensor:
        """Every row of the pages in the model's frame, `[B, 1, T, D]`."""
        return torch.cat([super().restore(), torch.cat([*self.rope()], 2).to(self.matrix)], -1)


class LatentPages(LayerPages):
    """The pages of one layer: keys `[T, 1, R + rope channels]` and values `[T, 1, R]`."""

    copied = ("key",)
    """Values are their first channels."""
    rotates_few = False  # a block of that kernel has too few threads for a latent

    def _lay_out(self, memory: torch.Tensor, slots: int, dtype: torch.dtype) -> int:
        self._frames: dict[bool, Frame] = {}  # of many heads, or not
        layout = self.codec.page_layout(self.layer, LATENT, self.tokens, self.format)
        self.memory = {LATENT: memory[:, : layout.bytes], ROPE: memory[:, layout.bytes :]}
        # Prompts ask for keys and values: what is exact takes the place of keys.
        self.layouts = dict.fromkeys((LATENT, *SIDES), layout)
        self.memory |= {"key": self.memory[ROPE], "value": self.memory[LATENT]}
        self.dtype, beside = dtype, self.memory[ROPE].shape[1]
        self.rope_dim = beside // (self.tokens * dtype.itemsize)
        shape = slots, 1, self.tokens, layout.dim + self.rope_dim
        keys = torch.zeros(shape, dtype=dtype, device=memory.device)
        self.copies = {"key": keys, "value": keys[..., : layout.dim]}
        return layout.bytes + self.rope_dim * self.tokens * dtype.itemsize

    def rope(self, pages: torch.Tensor) -> torch.Tensor:
        """Exact keys with RoPE `[N, P, rope channels]` from their bytes `[N, bytes]`, uint8."""
        exact: torch.Tensor = pages.view(self.dtype).unflatten(1, (self.tokens, self.rope_dim))
        return exact

    def dequantize(self, side: str, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """As in `LayerPages`; for keys, the exact ones `[T, 1, rope channels]`."""
        if side == "key":
            return self.rope(self.memory[ROPE])[pages, places][:, None]
        return super().dequantize(side, pages, places)

    @cached_property
    def segments(self) -> dict[str, parameters.IntoPages]:
        latents = super().segments[LATENT]
        exact = latents._replace(memory=self.memory[ROPE])
        return {LATENT: latents, "key": exact, "value": latents}

    def has_few(self, rows: Rows) -> bool:
        """As in `LayerPages`, in several launches."""
        return self.has_segments and len(rows["key"]) <= _FEW

    @property
    def _row_type(self) -> torch.dtype:
        """They store channels alone."""
        return torch.float32

    @torch.no_grad()
    def store(self, step: Step, rows: Rows) -> None:
        """Store new tokens: latents as in `LayerPages.store`, and exact keys with RoPE."""
        super().store(step, {LATENT: rows["value"]})
        rope = rows["key"][:, :, -self.rope_dim :]
        if not kernels_run_on(rope.device):
            self._count(step, ROPE, int2.find_refused(rope.transpose(0, 1).float()))
            self.rope(self.memory[ROPE])[step.pages, step.page_offsets] = rope[:, 0]
            return
        size, bad = rope.element_size(), self.bad[self.counted.index(ROPE)]
        arguments = parameters.StoreExact(
            rows=rope,
            stride=rope.stride(0) * size,
            row_bytes=self.rope_dim * size,
            number_bytes=size,
            largest=_largest_bits(rope.dtype),
            pages=step.pages,
            places=step.page_offsets,
            memory=self.memory[ROPE],
            page_bytes=self.page_bytes,
            bad=bad,
        )
        kernel = store_kernel("store_exact", self.tokens, rope.device)
        Launcher(rope.device)(kernel, (len(rope), 1, 1), 32, arguments, early=False)

    def _packed(self, decode: DecodeMetadata, pages: int, side: str) -> PackedSide:
        blocks = (
            PageBlocks(self.memory[name], decode.page_table, pages) for name in (LATENT, ROPE)
        )
        latents, rope = blocks
        packed = self.codec.packed_side(self.layer, LATENT, self.layouts[LATENT], latents)
        base = self.memory[LATENT].data_ptr()
        packed = replace(packed, table=decode.page_table, base=base, unit=self.page_bytes)
        if side == "value":
            return packed

        def read_rope() -> list[torch.Tensor]:  # for the definition: a kernel reads it in the pages
            return [self.rope(block)[:, None] for block in rope]

        return LatentKeys(**vars(packed), rope=read_rope)

    def _has_kernel(self, packed: PackedTokens, windows: Windows, dtype: torch.dtype) -> bool:
        return cuda_latents.supports(packed.key.layout, self.rope_dim, dtype)

    def _attend(
        self,
        queries: torch.Tensor,
        packed: PackedTokens,
        windows: Windows,
        scores: Scores,
        output: torch.Tensor,
    ) -> None:
        query, into = (each.transpose(1, 2) for each in (queries, output))
        given = self.layouts[LATENT], self.rope_dim, query.dtype, query.device
        variant = cuda_latents.choose_variant(query.shape[1:3].numel(), *given)
        if variant.has_many not in self._frames:
            self._frames[variant.has_many] = Frame.of(packed.value, variant)
        frame = replace(self._frames[variant.has_many], variant=variant)
        cuda_latents.attend(query, packed, windows, frame, scores.scale, into)


@cache
def _largest_bits(dtype: torch.dtype) -> int:
    """The bits of the largest number of a type that `int2.find_refused` does not refuse."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    largest = min(int2.LARGEST, torch.finfo(dtype).max)
    return int(torch.tensor(largest, dtype=dtype).view(bits))


def absorb(latents: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of latents `[L, R]` and exact keys `[L, rope channels]` for queries in
    the frame of latents: one head."""
    return torch.cat([latents, rope], -1)[:, None], latents[:, None]


class LatentReader(LayerReader):
    """What the new tokens of a step read in one layer with latents. Prompts read keys and values of
    heads, which are computed from latents: they have fewer channels."""

    pages: LatentPages

    def __init__(
        self,
        pages: LatentPages,
        attention: TorchAttention | None = None,
        lend: Lend | None = None,
        expand: Callable[..., tuple[torch.Tensor, torch.Tensor]] = absorb,
    ):
        """`expand`: computes keys `[L, H_q, D]` and values `[L, H_q, D_v]` from latents `[L, R]`
        and exact keys `[L, rope channels]`."""
        super().__init__(pages, attention, lend)
        self._expand, self._key_mean = expand, None
        self.copies = dict.fromkeys(SIDES, pages.copies["key"])

    def _new_rows(self, rows: Rows) -> Sequence[torch.Tensor]:
        key = rows["key"][:, 0]
        return self._expand(*key.tensor_split([key.shape[1] - self.pages.rope_dim], 1))

    def _gather(
        self, step: Step, exact: Exact, rows: Rows, into: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The keys and values that a group of prompts reads exact. Both sides are whole keys here,
        of which those that are not finite differ: see `restore.cu`."""
        whole, count = dict.fromkeys(SIDES, rows["key"]), exact.read.max_tokens
        keys, values = (each[:count, 0] for each in super()._gather(step, exact, whole, into))
        rank = keys.shape[1] - self.pages.rope_dim
        return self._expand(values[:, :rank], keys[:, rank:])

    def _restore(
        self, table: torch.Tensor, segment: Segment, into: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The keys and values of a segment, from its restored latents."""
        dims = self.pages.rope_dim, self.pages.layouts[LATENT].dim
        count = segment.max_tokens
        parts = [
            each.flatten()[: count * dim].view(count, 1, dim)
            for each, dim in zip(into, dims, strict=True)
        ]
        rope, stored = super()._restore(table, segment, parts)
        mean, matrix = self._frame
        return self._expand(torch.addmm(mean, stored[:, 0], matrix), rope[:, 0])

    @cached_property
    def _frame(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of latents, and the matrix that takes them back to the model's frame."""
        pages = self.pages
        matrix = pages.codec.inverse(pages.layer, LATENT)[0].to(pages.dtype)
        mean = pages.codec.rotations[pages.layer][LATENT].mean
        if mean is None:
            return torch.zeros_like(matrix[0]), matrix
        return mean[0].to(matrix), matrix

    def _turn(self, query: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Queries as they are: keys are in the model's frame."""
        return query

    def _turn_back(self, output: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        return output
