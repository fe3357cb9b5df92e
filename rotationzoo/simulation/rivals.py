"""Simulations of other quantized caches, without calibrated rotations: KIVI's and those of engines.

`ENGINE_CACHES` lists those of engines, which are rewritten from their sources. Rows are `[..., D]`,
float32. Sources:

* llama.cpp: `ggml/src/ggml-quants.c` (`quantize_row_q4_0_ref`), after a multiplication with
  Hadamard matrices (`src/llama-kv-cache.cpp`: `build_input_k_rot`, `build_input_v_rot`);
* vLLM: `vllm/v1/attention/ops/int4_per_token_head.py`; for TurboQuant (arXiv 2504.19874)
  `vllm/v1/attention/ops/triton_turboquant_store.py`, `triton_turboquant_decode.py` and
  `vllm/model_executor/layers/quantization/turboquant/`. Its FP8 cache is also SGLang's;
* ExLlamaV3: `exllamav3/exllamav3_ext/cache/q_cache_kernels.cuh`, without its compander, which is
  off by default.

16-bit scales have the model's dtype in engines, but are always float16 here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from rotationzoo.codec import int2
from rotationzoo.errors import UsageError
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.compositions import hadamard
from rotationzoo.rotations import SIDES

BLOCK = 32
"""Channels that share a scale in llama.cpp and ExLlamaV3."""
_FP8_LARGEST = 448.0
_SMALLEST_ROTATION = 64  # llama.cpp rotates head dimensions that are multiples of this
_SIGN_SEED = 0x9E3779B9  # of vLLM's random signs
_ITERATIONS = 1000  # enough for Lloyd-Max centroids of 4 bits to converge to 1e-9


def read_q4_0(rows: torch.Tensor) -> torch.Tensor:
    """llama.cpp's q4_0: blocks of 32 channels, codes -8 to 7 (-8: the largest), float16 scale."""
    blocks = torch.unflatten(rows, -1, (-1, BLOCK))
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    codes = (blocks * torch.where(scale == 0, 0, 1 / scale) + 8.5).trunc().clamp(max=15)
    return ((codes - 8) * _as_half(scale)).flatten(-2)


def read_fp8(rows: torch.Tensor) -> torch.Tensor:
    """FP8 (e4m3) with the scale 1 and saturation."""
    return rows.clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).float()


def read_int4_per_token_head(rows: torch.Tensor) -> torch.Tensor:
    """vLLM's `int4_per_token_head`: random signs, an unnormalized Hadamard matrix, then codes 0 to
    15 with one scale and an integer zero, which is stored in the lowest four bits of the scale."""
    dim = rows.shape[-1]
    matrix = (_signs(dim)[:, None] * hadamard(dim) * math.sqrt(dim)).to(rows.device, torch.float32)
    rotated = rows @ matrix
    low, high = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero = _round_away(-low / scale).clamp(0, 15)
    codes = _round_away(rotated / scale + zero).clamp(0, 15)
    stored = (scale.view(torch.int32) & -16 | zero.int()).view(torch.float32)
    return (codes - zero) * stored @ matrix.mT / dim


def read_lloyd_max(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """TurboQuant's keys in vLLM: the row's norm in float16, and its direction times a Hadamard
    matrix, rounded to Lloyd-Max centroids and normalized again."""
    matrix = hadamard(rows.shape[-1]).to(rows.device, torch.float32)
    norm = rows.norm(dim=-1, keepdim=True)
    rotated = rows / (norm + 1e-8) @ matrix
    deviation: float = rows.shape[-1] ** -0.5  # of the channels of a random direction
    centroids = (gaussian_centroids(bits) * deviation).to(rows.device, torch.float32)
    midpoints = (centroids[1:] + centroids[:-1]) / 2
    directions = centroids[torch.bucketize(rotated, midpoints, right=True)]
    directions = directions / directions.square().sum(-1, keepdim=True).add(1e-16).sqrt()
    return directions * _as_half(norm) @ matrix.mT


@cache
def gaussian_centroids(bits: int) -> torch.Tensor:
    """The `2^bits` centroids of N(0, 1) with the least mean squared error, ascending, float64: the
    Lloyd-Max quantizer (Lloyd 1982, Max 1960). Each is the mean of the distribution between the
    midpoints to its neighbors: `(phi(a) - phi(b)) / (Phi(b) - Phi(a))` between a and b."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    end = torch.full((1,), torch.inf, dtype=torch.float64)
    quantiles = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    centroids: torch.Tensor = normal.icdf(quantiles)
    for _ in range(_ITERATIONS):
        edges = torch.cat([-end, (centroids[1:] + centroids[:-1]) / 2, end])
        density = normal.log_prob(edges).exp()
        mass = normal.cdf(edges)
        centroids = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
    return centroids


def read_uniform(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """TurboQuant's values in vLLM: unrotated, with a float16 minimum and scale per row."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    steps = (1 << bits) - 1
    scale = ((high - low) / steps).clamp(min=1e-8)
    codes = ((rows - low) / scale + 0.5).trunc().clamp(0, steps)
    return codes * _as_half(scale) + _as_half(low)


def read_exl3(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """ExLlamaV3: blocks of 32 channels times a Hadamard matrix, mid-rise codes, float16 maximum."""
    matrix = hadamard(BLOCK).to(rows.device, torch.float32)
    blocks = torch.unflatten(rows, -1, (-1, BLOCK)) @ matrix
    largest = blocks.abs().amax(-1, keepdim=True) + 1e-10
    half = 1 << (bits - 1)
    codes = (blocks / largest * half + half).floor().clamp(0, 2 * half - 1)
    levels = (codes - half + 0.5) / half
    return (levels * _as_half(largest) @ matrix).flatten(-2)


def _round_away(steps: torch.Tensor) -> torch.Tensor:
    """Round halves away from zero, as C's `roundf`."""
    return (steps.abs() + 0.5).floor() * steps.sign()


def _as_half(number: torch.Tensor) -> torch.Tensor:
    return number.half().float()


@cache
def _signs(dim: int) -> torch.Tensor:
    """vLLM's random signs `[D]`, the same on every machine."""
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    heads = torch.bernoulli(torch.full((dim,), 0.5), generator=generator)
    return (2 * heads - 1).double()


# ---- caches

_KIVI = int2.Format(interpolated=False, metadata="float16", offset="minimum", packing="consecutive")
"""Rounded codes `(x - minimum) / scale`, with scale and minimum in float16."""


@dataclass(frozen=True)
class Storage:
    """How one side of a cache is stored, and its bits."""

    read: Callable[[torch.Tensor], torch.Tensor]
    """From float32 rows `[..., T, D]` to the restored rows."""
    bits: float
    """Bits of a code, with its share of the scales of a group."""
    row_bits: int = 0
    """Bits of the scales of a whole row."""
    group: int = 1
    """Channels that are quantized together, a divisor of D."""
    tokens: int = 1
    """Successive tokens that are quantized together, a divisor of T."""


EngineCache = dict[str, Storage]


def _both(storage: Storage) -> EngineCache:
    return {"key": storage, "value": storage}


def _rotated(
    rows: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor], whole: bool
) -> torch.Tensor:
    """`read` in llama.cpp's rotated frame: by the largest Hadamard matrix that divides the row for
    keys (`whole`), and in blocks of 64 for values."""
    dim = rows.shape[-1]
    if dim % _SMALLEST_ROTATION:
        return read(rows)
    widest = dim & -dim  # the largest power of two that divides it
    matrix = hadamard(widest if whole else _SMALLEST_ROTATION).to(rows.device, torch.float32)
    blocks = torch.unflatten(rows, -1, (-1, len(matrix))) @ matrix
    stored = torch.unflatten(read(blocks.flatten(-2)), -1, (-1, len(matrix)))
    return (stored @ matrix.mT).flatten(-2)


def _in_blocks(read: Callable[[torch.Tensor], torch.Tensor], bits: int) -> Storage:
    """Blocks of 32 channels with a float16 scale."""
    return Storage(read, bits + 16 / BLOCK, group=BLOCK)


def _turboquant(key_bits: int, value_bits: int) -> EngineCache:
    key = Storage(partial(read_lloyd_max, bits=key_bits), key_bits, row_bits=16)
    value = Storage(partial(read_uniform, bits=value_bits), value_bits, row_bits=32)
    return {"key": key, "value": value}


def _exl3(bits: int) -> EngineCache:
    return _both(_in_blocks(partial(read_exl3, bits=bits), bits))


ENGINE_CACHES: dict[str, EngineCache] = {
    "q4_0": {
        "key": _in_blocks(partial(_rotated, read=read_q4_0, whole=True), 4),
        "value": _in_blocks(partial(_rotated, read=read_q4_0, whole=False), 4),
    },
    "fp8": _both(Storage(read_fp8, 8)),
    "int4_per_token_head": _both(Storage(read_int4_per_token_head, 4, row_bits=32)),
    "turboquant_4bit_nc": _turboquant(4, 4),
    "turboquant_k3v4_nc": _turboquant(3, 4),
    "turboquant_3bit_nc": _turboquant(3, 3),
    "exl3-2": _exl3(2),
    "exl3-3": _exl3(3),
    "exl3-4": _exl3(4),
}
"""Caches by their name in the engine, or by engine and bits."""


def store_as_kivi(side: str, dim: int, tokens: int = 32, channels: int = 32) -> Storage:
    """How KIVI (arXiv 2402.02750) stores a side in 2 bits.

    * Keys: `tokens` successive tokens of a channel share a scale and a minimum.
    * Other sides: `channels` channels of one token, or their greatest common divisor with the head
      dimension. KIVI itself quantizes each value as soon as it leaves the window, so this is
      slightly in its favor.
    """

    def read(rows: torch.Tensor, group: int) -> torch.Tensor:
        return int2.dequantize(int2.quantize(rows, 1.0, group, _KIVI), _KIVI)

    if side == "key":
        a_code = int2.bits_per_element(tokens, format=_KIVI)
        # One row per channel, in groups of tokens.
        return Storage(lambda rows: read(rows.mT, tokens).mT, a_code, tokens=tokens)
    group = math.gcd(channels, dim)
    a_code = int2.bits_per_element(group, format=_KIVI)
    return Storage(partial(read, group=group), a_code, group=group)


@dataclass(frozen=True)
class RivalCodec:
    """The codec of a cache without our rotations.

    Most engines keep no token exact. An evaluation gives all of them the windows of the rotated
    caches, in their favor. Groups of tokens are counted from the end of the sink, and those of an
    incomplete group stay exact.
    """

    storage: Callable[[str, int], Storage]
    """`(side, head dimension)` to the storage."""

    @classmethod
    def of_engine(cls, name: str) -> "RivalCodec":
        cache = ENGINE_CACHES[name]
        return cls(lambda side, dim: cache[side])

    @property
    def token_group(self) -> int:
        return self.storage("key", BLOCK).tokens

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` after the sink, as the engine reads them."""
        storage = self.storage(side, rows.shape[-1])
        complete = rows.shape[2] // storage.tokens * storage.tokens
        if not complete:
            return rows
        stored = storage.read(rows[:, :, :complete].float()).to(rows.dtype)
        return torch.cat([stored, rows[:, :, complete:]], dim=2)

    def stored_bits(self, layer: int, side: str, dim: int, format: int2.Format) -> float:
        storage = self.storage(side, dim)
        return storage.bits + storage.row_bits / dim


def check_engine_cache(name: str, geometry: Geometry) -> None:
    """Raise `UsageError` for a model with rows that one of `ENGINE_CACHES` cannot store."""
    for layer in cached_layers(geometry):
        if layer.sides != SIDES:
            problem = f"{name} stores keys and values, and this model caches {layer.cached.words}"
            raise UsageError(problem, f"leave {name} out of --rivals")
        for side in SIDES:
            group, dim = ENGINE_CACHES[name][side].group, layer.dims[side]
            if dim % group:
                has = f"{side}s of layer {layer.index} have {dim}"
                problem = f"{name} stores {group} channels together, and {has}"
                raise UsageError(problem, f"leave {name} out of --rivals")
