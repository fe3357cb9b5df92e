"""Other engines' quantized caches, simulated: what a reader gets back from stored keys and values.

Each is written from the engine's source, in plain torch, and stands beside the 2-bit formats only
in comparisons: these caches take no calibrated rotation. Rows are `[..., D]`, one per token and KV
head. Sources:

* llama.cpp: `ggml/src/ggml-quants.c` (`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`) and
  `src/llama-kv-cache.cpp` (`build_input_k_rot`, `build_input_v_rot`: the Hadamard matrices that
  rows are multiplied with before they are quantized, since pull request 21038);
* vLLM: `vllm/v1/attention/ops/int4_per_token_head.py`, and for TurboQuant (arXiv 2504.19874)
  `vllm/v1/attention/ops/triton_turboquant_store.py`, `triton_turboquant_decode.py` and
  `vllm/model_executor/layers/quantization/turboquant/`. Its FP8 cache is SGLang's, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from rotationzoo.codec import int2
from rotationzoo.linalg.hadamard import hadamard
from rotationzoo.rotations import Rotations
from rotationzoo.simulation.arm import Arm

_FP8_LARGEST = 448.0
_BLOCK = 32  # channels of a llama.cpp block
_SMALLEST_ROTATION = 64  # llama.cpp rotates head dimensions that are multiples of this
_SIGN_SEED = 0x9E3779B9  # of vLLM's random signs
_ITERATIONS = 1000  # enough for Lloyd-Max centroids of 4 bits to converge to 1e-9


@dataclass(frozen=True)
class Storage:
    """How one side of a cache is stored: what comes back of rows, and what they take."""

    read: Callable[[torch.Tensor], torch.Tensor]
    """Float32 rows `[..., D]` to the rows that a reader gets back."""
    bits: float
    """Bits of a code."""
    row_bits: int = 0
    """Bits of the scales of a whole row."""

    def bits_per_element(self, dim: int) -> float:
        """Bits per element of rows of `dim` channels."""
        return self.bits + self.row_bits / dim


@dataclass(frozen=True)
class EngineCache:
    """A quantized cache of an engine."""

    engine: str
    key: Storage
    value: Storage

    def side(self, name: str) -> Storage:
        """The storage of a side, `key` or `value`."""
        return {"key": self.key, "value": self.value}[name]


def read_q8_0(rows: torch.Tensor) -> torch.Tensor:
    """llama.cpp's q8_0: blocks of 32 channels with codes -127 to 127 and a float16 scale."""
    blocks = torch.unflatten(rows, -1, (-1, _BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = _round_away(blocks * _reciprocal(scale))
    return (codes * _as_half(scale)).flatten(-2)


def read_q4_0(rows: torch.Tensor) -> torch.Tensor:
    """llama.cpp's q4_0: blocks of 32 channels with codes -8 to 7 and a float16 scale, so that the
    entry of largest magnitude has the code -8."""
    blocks = torch.unflatten(rows, -1, (-1, _BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    codes = (blocks * _reciprocal(scale) + 8.5).trunc().clamp(max=15)
    return ((codes - 8) * _as_half(scale)).flatten(-2)


def read_fp8(rows: torch.Tensor) -> torch.Tensor:
    """FP8 (e4m3) with the scale 1, which saturates."""
    return rows.clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).float()


def read_int4_per_token_head(rows: torch.Tensor) -> torch.Tensor:
    """vLLM's `int4_per_token_head`: random signs, an unnormalised Hadamard matrix, then codes 0 to
    15 with one scale and an integer zero. The zero takes the lowest four bits of the scale."""
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
    """TurboQuant's keys in vLLM: the direction of a row, times a Hadamard matrix, rounded to
    Lloyd-Max centroids and normalised again, and the row's norm in float16."""
    dim = rows.shape[-1]
    matrix = hadamard(dim).to(rows.device, torch.float32)
    norm = rows.norm(dim=-1, keepdim=True)
    rotated = rows / (norm + 1e-8) @ matrix
    centroids = gaussian_centroids(bits).to(rows.device, torch.float32) / math.sqrt(dim)
    midpoints = (centroids[1:] + centroids[:-1]) / 2
    directions = centroids[torch.bucketize(rotated, midpoints, right=True)]
    directions = directions / directions.square().sum(-1, keepdim=True).add(1e-16).sqrt()
    return directions * _as_half(norm) @ matrix.mT


@cache
def gaussian_centroids(bits: int) -> torch.Tensor:
    """The `2^bits` centroids of N(0, 1) with the least mean squared error, ascending, float64:
    the Lloyd-Max quantizer (Lloyd 1982, Max 1960), which TurboQuant rounds keys with.

    Each centroid is the mean of the distribution between the midpoints to its neighbours. The mean
    between a and b is `(phi(a) - phi(b)) / (Phi(b) - Phi(a))`.
    """
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
    """TurboQuant's values in vLLM: codes of the whole row with a minimum and a scale, both stored
    in float16 after rounding. They are not rotated."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    steps = (1 << bits) - 1
    scale = ((high - low) / steps).clamp(min=1e-8)
    codes = ((rows - low) / scale + 0.5).trunc().clamp(0, steps)
    return codes * _as_half(scale) + _as_half(low)


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
    each = bits + 16 / _BLOCK
    return EngineCache("llama.cpp", Storage(key, each), Storage(value, each))


def _turboquant(key: Storage, value_bits: int) -> EngineCache:
    value = Storage(partial(read_uniform, bits=value_bits), value_bits, row_bits=32)
    return EngineCache("vLLM", key, value)


def _lloyd_max_keys(bits: int) -> Storage:
    return Storage(partial(read_lloyd_max, bits=bits), bits, row_bits=16)


_Q4_0, _FP8 = Storage(read_q4_0, 4.5), Storage(read_fp8, 8)
_INT4 = Storage(read_int4_per_token_head, 4, row_bits=32)

ENGINE_CACHES = {
    "q8_0": _llama_cpp(read_q8_0, 8),
    "q4_0": _llama_cpp(read_q4_0, 4),
    "q4_0-unrotated": EngineCache("llama.cpp, LLAMA_ATTN_ROT_DISABLE=1", _Q4_0, _Q4_0),
    "fp8": EngineCache("vLLM, SGLang", _FP8, _FP8),
    "int4_per_token_head": EngineCache("vLLM", _INT4, _INT4),
    "turboquant_k8v4": _turboquant(_FP8, 4),
    "turboquant_4bit_nc": _turboquant(_lloyd_max_keys(4), 4),
    "turboquant_k3v4_nc": _turboquant(_lloyd_max_keys(3), 4),
    "turboquant_3bit_nc": _turboquant(_lloyd_max_keys(3), 3),
}
"""The caches by the names that their engines give them."""


@dataclass(frozen=True)
class EngineArm(Arm):
    """An arm that stores keys and values as one of these caches does, which is its name.

    These engines keep no token exact, not even the one that they decode. An evaluation gives them
    the windows of the other arms, in their favor. The format of the others does not matter.
    """

    rotations: Rotations = field(default_factory=lambda: Rotations({}))

    @property
    def cache(self) -> EngineCache:
        """The cache of this name."""
        return ENGINE_CACHES[self.name]

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values as they are."""
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` as the engine reads them back, in their type."""
        return self.cache.side(side).read(rows.float()).to(rows.dtype)

    def row_range(self, rows: torch.Tensor, layer: int, side: str) -> None:
        """Engines do not say in which coordinates they round."""

    def stored_bits(self, side: str, dim: int, format: int2.Format) -> float:
        """Bits per element, with its share of the scales."""
        return self.cache.side(side).bits_per_element(dim)


def _round_away(steps: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, halves away from zero, as C's `roundf` does."""
    return (steps.abs() + 0.5).floor() * steps.sign()


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0, 1 / scale)


def _as_half(number: torch.Tensor) -> torch.Tensor:
    return number.half().float()


@cache
def _signs(dim: int) -> torch.Tensor:
    """vLLM's random signs `[D]`, the same on every machine."""
    generator = torch.Generator().manual_seed(_SIGN_SEED)
    heads = torch.bernoulli(torch.full((dim,), 0.5), generator=generator)
    return (2 * heads - 1).double()
