"""Random caches of one layer for the benchmarks of decoding, in bfloat16 and in 2 bits."""

from dataclasses import dataclass

import torch

from rotationzoo.codec.attention import ExactWindow, PackedSide, PackedTokens
from rotationzoo.codec.formats import FINE, FORMATS
from rotationzoo.codec.pages import PageLayout
from rotationzoo.rotations import SIDES

LAYOUTS = FORMATS | {"fine": FINE}


@dataclass(frozen=True)
class Shape:
    """One layer of attention: requests of the same length, one new token each."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.batch} x {self.context:,}"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in bfloat16."""
        return 2 * 2 * self.kv_heads * self.dim

    @property
    def bytes(self) -> int:
        """Bytes of the bfloat16 cache, all of which a step reads."""
        return self.batch * self.context * self.token_bytes


@dataclass(frozen=True)
class Storage:
    """How a 2-bit cache is stored."""

    format: str
    page: int = 256
    sink: int = 64
    recent: int = 256

    @property
    def exact(self) -> int:
        """Tokens of a request that stay in bfloat16."""
        return self.sink + self.recent

    def layout(self, heads: int, dim: int) -> PageLayout:
        """The pages of keys, and of values."""
        return PageLayout(heads, dim, 1, self.page, LAYOUTS[self.format])

    def token_bytes(self, heads: int, dim: int) -> float:
        """Bytes of a packed token's keys and values, without what fills the last page."""
        format = LAYOUTS[self.format]
        metadata = format.metadata_numbers * format.metadata_bits / 8
        return 2 * heads * (format.row_bytes(dim) + metadata)

    def bytes(self, shape: Shape) -> int:
        """Bytes of packed and exact tokens that a step reads."""
        packed = (shape.context - self.exact) * self.token_bytes(shape.kv_heads, shape.dim)
        return int(shape.batch * (packed + self.exact * shape.token_bytes))


@dataclass(frozen=True)
class PackedCache:
    """The cache of one layer in 2 bits: the arguments of `attend` after the query."""

    packed: PackedTokens
    head: ExactWindow
    tail: ExactWindow


def packed_caches(shape: Shape, storage: Storage, copies: int, device: str) -> list[PackedCache]:
    """Caches of random codes with scales and offsets as those of rows of variance 1 have."""
    tokens = shape.context - storage.exact
    layout = storage.layout(shape.kv_heads, shape.dim)
    sides = [_sides(layout, shape.batch, tokens, copies, device) for _ in SIDES]
    lengths = torch.full((shape.batch,), tokens, dtype=torch.int32, device=device)
    recent = torch.full((shape.batch,), storage.recent, dtype=torch.int32, device=device)
    caches = []
    for key, value in zip(*sides, strict=True):
        head = ExactWindow(*_window(shape, storage.sink, device))
        tail = ExactWindow(*_window(shape, storage.recent, device), recent)
        caches.append(PackedCache(PackedTokens(key, value, lengths), head, tail))
    return caches


def random_pages(layout: PageLayout, count: int, device: str) -> torch.Tensor:
    """Pages of random codes, uint8 `[count, bytes of a page]`."""
    size = count, layout.bytes
    pages = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    sections = layout.view(pages)
    sections.scale.uniform_(1.2, 1.8)
    # Both put the middle of the codes near zero.
    low, high = (1.2, 1.8) if layout.format.offset == "zero" else (-2.4, -2.0)
    sections.offset.uniform_(low, high)
    return pages


def _sides(
    layout: PageLayout, batch: int, tokens: int, copies: int, device: str
) -> list[PackedSide]:
    count = -(-tokens // layout.tokens)
    pages = random_pages(layout, copies * count * batch, device)
    matrix = torch.linalg.qr(torch.randn(layout.heads, layout.dim, layout.dim, device=device)).Q
    matrix = matrix.contiguous()  # or every launch would copy it
    numbers = torch.arange(copies * count * batch, device=device)
    table = (pages.data_ptr() + numbers * layout.bytes).view(copies, count, batch)
    blocks = pages.view(copies, count, batch, layout.bytes)
    return [
        PackedSide(blocks[copy].unbind(), layout, matrix, table=table[copy].mT.contiguous())
        for copy in range(copies)
    ]


def _window(shape: Shape, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    size = 2, shape.batch, shape.kv_heads, tokens, shape.dim
    key, value = torch.randn(size, dtype=torch.bfloat16, device=device)
    return key, value


def exact_caches(shape: Shape, copies: int, device: str) -> torch.Tensor:
    """Random keys and values, bfloat16 `[copies, 2, B * T * H * D]`. Each way of reading them lays
    out the last dimension as it likes."""
    size = copies, 2, shape.bytes // 4
    return torch.randn(size, dtype=torch.bfloat16, device=device)
