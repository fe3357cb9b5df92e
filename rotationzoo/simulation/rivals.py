"""Quantized caches that a user may pick instead, simulated: KIVI's and those of engines.

They are compared with the 2-bit formats, and take no calibrated rotation. `engine_formats` stores
their rows. llama.cpp first multiplies rows with Hadamard matrices, since pull request 21038:
`src/llama-kv-cache.cpp` (`build_input_k_rot`, `build_input_v_rot`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from rotationzoo.codec import int2
from rotationzoo.errors import UsageError
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.hadamard import hadamard
from rotationzoo.rotations import SIDES
from rotationzoo.simulation import engine_formats as engines
from rotationzoo.simulation.engine_formats import BLOCK, TILE

_KIVI = int2.Format(interpolated=False, metadata="float16", offset="minimum", packing="consecutive")
"""Codes are `(x - minimum) / scale`, rounded, with scale and minimum in float16 and no clip."""
_SMALLEST_ROTATION = 64  # llama.cpp rotates head dimensions that are multiples of this


@dataclass(frozen=True)
class Storage:
    """How one side of a cache is stored: what comes back of rows, and what they take."""

    read: Callable[[torch.Tensor], torch.Tensor]
    """Float32 rows `[..., T, D]` to the rows that a reader gets back."""
    bits: float
    """Bits of a code, with its share of the scales of a group."""
    row_bits: int = 0
    """Bits of the scales of a whole row."""
    group: int = 1
    """Channels that are quantized together: they divide D."""
    tokens: int = 1
    """Successive tokens that are quantized together: they divide T."""


@dataclass(frozen=True)
class EngineCache:
    """A quantized cache of an engine."""

    engine: str
    key: Storage
    value: Storage

    def side(self, name: str) -> Storage:
        """The storage of a side, `key` or `value`."""
        return {"key": self.key, "value": self.value}[name]


def _rotated(
    rows: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor], whole: bool
) -> torch.Tensor:
    """What `read` gives in llama.cpp's rotated frame. Keys are multiplied with the widest Hadamard
    matrix that divides the row (`whole`), values with blocks of 64."""
    dim = rows.shape[-1]
    if dim % _SMALLEST_ROTATION:
        return read(rows)
    widest = dim & -dim  # the largest power of two that divides it
    matrix = hadamard(widest if whole else _SMALLEST_ROTATION).to(rows.device, torch.float32)
    blocks = torch.unflatten(rows, -1, (-1, len(matrix))) @ matrix
    stored = torch.unflatten(read(blocks.flatten(-2)), -1, (-1, len(matrix)))
    return (stored @ matrix.mT).flatten(-2)


def _llama_cpp(read: Callable[[torch.Tensor], torch.Tensor], bits: int) -> EngineCache:
    key, value = (partial(_rotated, read=read, whole=whole) for whole in (True, False))
    return EngineCache("llama.cpp", _in_blocks(key, bits), _in_blocks(value, bits))


def _in_blocks(read: Callable[[torch.Tensor], torch.Tensor], bits: int) -> Storage:
    """Blocks of 32 channels with a float16 scale."""
    return Storage(read, bits + 16 / BLOCK, group=BLOCK)


def _turboquant(key_bits: int, value_bits: int) -> EngineCache:
    """Keys of 8 bits are FP8."""
    key = Storage(partial(engines.read_lloyd_max, bits=key_bits), key_bits, row_bits=16)
    value = Storage(partial(engines.read_uniform, bits=value_bits), value_bits, row_bits=32)
    return EngineCache("vLLM", _FP8 if key_bits == 8 else key, value)


def _exl3(bits: int) -> EngineCache:
    each = _in_blocks(partial(engines.read_exl3, bits=bits), bits)
    return EngineCache("ExLlamaV3", each, each)


def _mlx(bits: int) -> EngineCache:
    read = partial(engines.read_mlx, bits=bits)
    each = Storage(read, bits + 32 / engines.MLX_GROUP, group=engines.MLX_GROUP)
    return EngineCache("mlx-lm", each, each)


def _kvarn(key_bits: int, value_bits: int) -> EngineCache:
    """A channel of a tile has a scale and a minimum and a token a scale; of values, vice versa."""
    key = partial(engines.read_kvarn, bits=key_bits, per_channel=True)
    value = partial(engines.read_kvarn, bits=value_bits, per_channel=False)
    return EngineCache(
        "KVarN",
        Storage(key, key_bits + 32 / TILE, row_bits=16, tokens=TILE),
        Storage(value, value_bits + 16 / TILE, row_bits=32, tokens=TILE),
    )


_Q4_0, _FP8 = _in_blocks(engines.read_q4_0, 4), Storage(engines.read_fp8, 8)
_INT4 = Storage(engines.read_int4_per_token_head, 4, row_bits=32)
_NVFP4 = Storage(engines.read_nvfp4, 4 + 8 / engines.NVFP4_BLOCK, group=engines.NVFP4_BLOCK)
_LMDEPLOY = EngineCache(
    "LMDeploy",
    Storage(partial(engines.read_lmdeploy, bits=3, with_signs=True), 4, row_bits=32),
    Storage(partial(engines.read_lmdeploy, bits=2, with_signs=False), 2, row_bits=16),
)

ENGINE_CACHES = {
    "q8_0": _llama_cpp(engines.read_q8_0, 8),
    "q4_0": _llama_cpp(engines.read_q4_0, 4),
    "q4_0-unrotated": EngineCache("llama.cpp, LLAMA_ATTN_ROT_DISABLE=1", _Q4_0, _Q4_0),
    "fp8": EngineCache("vLLM, SGLang", _FP8, _FP8),
    "int4_per_token_head": EngineCache("vLLM", _INT4, _INT4),
    "turboquant_k8v4": _turboquant(8, 4),
    "turboquant_4bit_nc": _turboquant(4, 4),
    "turboquant_k3v4_nc": _turboquant(3, 4),
    "turboquant_3bit_nc": _turboquant(3, 3),
    "kvarn-k2v2": _kvarn(2, 2),
    "kvarn-k4v2": _kvarn(4, 2),
    "exl3-2": _exl3(2),
    "exl3-3": _exl3(3),
    "exl3-4": _exl3(4),
    "lmdeploy-42": _LMDEPLOY,
    "mlx-2": _mlx(2),
    "mlx-3": _mlx(3),
    "mlx-4": _mlx(4),
    "nvfp4": EngineCache("vLLM, TensorRT-LLM", _NVFP4, _NVFP4),
}
"""The caches by the names that their engines give them, or by engine and bits."""


def store_as_kivi(side: str, dim: int, tokens: int = 32, channels: int = 32) -> Storage:
    """How KIVI (arXiv 2402.02750) stores a side in 2 bits.

    * Keys: `tokens` successive tokens of a channel share a scale and a minimum.
    * Other sides: `channels` channels of one token do, or their greatest common divisor
      with the head dimension. KIVI itself quantizes a value as soon as it leaves the window, and
      not with its key, so this is slightly in its favor.
    """

    def read(rows: torch.Tensor, group: int) -> torch.Tensor:
        return int2.dequantize(int2.quantize(rows, 1.0, group, _KIVI), _KIVI)

    if side == "key":
        a_code = int2.bits_per_element(tokens, format=_KIVI)
        # One row per channel, cut into groups of tokens.
        return Storage(lambda rows: read(rows.mT, tokens).mT, a_code, tokens=tokens)
    group = math.gcd(channels, dim)
    a_code = int2.bits_per_element(group, format=_KIVI)
    return Storage(partial(read, group=group), a_code, group=group)


@dataclass(frozen=True)
class RivalCodec:
    """The codec of a cache that takes no rotation of ours: `storage` says how it stores a side.

    Most engines keep no token exact, not even the one that they decode. An evaluation gives all of
    them the windows of the rotated caches, in their favor. Groups of tokens are counted from the
    end of the sink, and those of an incomplete group stay exact.
    """

    storage: Callable[[str, int], Storage]
    """`(side, head dimension)` to the storage."""

    @classmethod
    def of_engine(cls, name: str) -> "RivalCodec":
        """The codec of one of `ENGINE_CACHES`."""
        cache = ENGINE_CACHES[name]
        return cls(lambda side, dim: cache.side(side))

    @property
    def token_group(self) -> int:
        """How many tokens are quantized together, as in `CacheLayout`."""
        return self.storage("key", BLOCK).tokens

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values as they are."""
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        """Keys or values `[B, H, T, D]`, of tokens after the sink, as the engine reads them."""
        storage = self.storage(side, rows.shape[-1])
        complete = rows.shape[2] // storage.tokens * storage.tokens
        if not complete:
            return rows
        stored = storage.read(rows[:, :, :complete].float()).to(rows.dtype)
        return torch.cat([stored, rows[:, :, complete:]], dim=2)

    def stored_bits(self, layer: int, side: str, dim: int, format: int2.Format) -> float:
        """Bits per element, with its share of the scales."""
        storage = self.storage(side, dim)
        return storage.bits + storage.row_bits / dim


def check_engine_cache(name: str, geometry: Geometry) -> None:
    """Raise `UsageError` for a model with rows that one of `ENGINE_CACHES` cannot store."""
    for layer in cached_layers(geometry):
        if layer.sides != SIDES:
            problem = f"{name} stores keys and values, and this model caches {layer.cached.words}"
            raise UsageError(problem, f"leave {name} out of --rivals")
        for side in SIDES:
            group, dim = ENGINE_CACHES[name].side(side).group, layer.dims[side]
            if dim % group:
                has = f"{side}s of layer {layer.index} have {dim}"
                problem = f"{name} stores {group} channels together, and {has}"
                raise UsageError(problem, f"leave {name} out of --rivals")
