"""The kernels that the benchmarks of decoding compare: bfloat16 attention as others have it, and
ours over packed codes."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from decode_caches import PackedCache, Shape
from sglang_kernel import SglangDecode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rotationzoo.codec.attention import Scores

SPLITS = (8, 16, 32, 64, 128)
_PACKED_SPLITS = (2, 4, 8, 16, 32, 64, 128, 256)
_PARTS = range(128, 8193)
"""How many parts of all KV heads of all requests it makes sense to cut the tokens into."""

Read = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of a query `[B, H_q, 1, D]` to keys and values, to an output of the query's shape."""


Variant = tuple[str, Callable[[torch.Tensor, PackedCache], torch.Tensor]]
"""A name, and attention of a query to a packed cache."""


@dataclass(frozen=True)
class Arm:
    """One way of calling a kernel on a bfloat16 cache."""

    name: str
    variant: str
    read: Read
    tokens_first: bool
    """Whether keys and values are `[B, T, H, D]` in memory, and not `[B, H, T, D]`."""

    def view(self, memory: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` in memory of so many elements."""
        if self.tokens_first:
            size = shape.batch, -1, shape.kv_heads, shape.dim
            return memory.view(size).transpose(1, 2)
        return memory.view(shape.batch, shape.kv_heads, -1, shape.dim)


def exact_arms(shape: Shape, sglang: ModuleType | None, splits: Sequence[int]) -> Iterator[Arm]:
    """Every bfloat16 kernel that can be tried, in every variant."""
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for name, backend in (("sdpa flash", flash), ("sdpa cuDNN", cudnn)):
        for tokens_first in (False, True):
            order = "tokens first" if tokens_first else "heads first"
            yield Arm(name, f"group as queries, {order}", _grouped(backend), tokens_first)
        yield Arm(name, "enable_gqa, heads first", _gqa(backend), False)
    flash3 = _flash3(shape)
    if flash3 is not None:
        yield Arm("FlashAttention-3", "tokens first", flash3, True)
    if sglang is not None:
        for count in splits:
            yield Arm("SGLang Triton", f"{count} splits", _sglang(sglang, shape, count), True)


def _grouped(backend: SDPBackend) -> Read:
    def read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = query.view(query.shape[0], key.shape[1], -1, query.shape[-1])
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(rows, key, value).reshape(query.shape)

    return read


def _gqa(backend: SDPBackend) -> Read:
    def read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return read


def _sglang(module: ModuleType, shape: Shape, splits: int) -> Read:
    kernel = SglangDecode(module, shape.batch, shape.context, shape.heads, splits)

    def read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = query[:, :, 0], *(part.transpose(1, 2).flatten(0, 1) for part in (key, value))
        return kernel(*rows).view(query.shape)

    return read


def _flash3(shape: Shape) -> Read | None:
    try:
        module = importlib.import_module("flash_attn_interface")
    except ImportError:
        return None
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda")

    def read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = [part.transpose(1, 2) for part in (query, key, value)]
        output: torch.Tensor = module.flash_attn_with_kvcache(*rows, cache_seqlens=lengths)
        return output.view(query.shape)

    return read


def packed_variants(attend: Callable[..., torch.Tensor], shape: Shape) -> Iterator[Variant]:
    """The kernel of this project over a packed cache, with its own choice of splits and, where it
    lets the caller choose, with others."""

    def reader(**options: int) -> Callable[[torch.Tensor, PackedCache], torch.Tensor]:
        def read(query: torch.Tensor, cache: PackedCache) -> torch.Tensor:
            scores = Scores(query.shape[-1] ** -0.5)
            return attend(query, cache.packed, cache.head, cache.tail, scores, **options)

        return read

    yield "its own splits", reader()
    if "splits" in inspect.signature(attend).parameters:
        for count in _PACKED_SPLITS:
            if count * shape.batch * shape.kv_heads in _PARTS:
                yield f"{count} splits", reader(splits=count)


def exact_error(
    output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> float:
    """Relative error of the first request's output, against float32."""
    size = key.shape[1], -1, query.shape[-1]
    rows = query[0].float().view(size)
    logits = rows @ key[0].float().mT * query.shape[-1] ** -0.5
    expected = (logits.softmax(-1) @ value[0].float()).flatten()
    difference = output[0].float().flatten() - expected
    return float(difference.norm() / expected.norm())


def first_request(cache: PackedCache) -> PackedCache:
    """The cache of the first request of a batch alone."""
    packed, sides = cache.packed, []
    for side in (packed.key, packed.value):
        blocks = [block[:1] for block in side.blocks]
        sides.append(replace(side, blocks=blocks, table=None))
    windows = []
    for window in (cache.head, cache.tail):
        lengths = None if window.lengths is None else window.lengths[:1]
        windows.append(replace(window, key=window.key[:1], value=window.value[:1], lengths=lengths))
    key, value = sides
    return PackedCache(replace(packed, key=key, value=value, lengths=packed.lengths[:1]), *windows)
