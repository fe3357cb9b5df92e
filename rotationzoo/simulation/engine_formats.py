"""What other engines' caches give back of rows, one function for each way of storing them.

Each is written anew from the engine's source. Rows are `[..., D]`, float32. Sources:

* llama.cpp: `ggml/src/ggml-quants.c` (`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref`);
* vLLM: `vllm/v1/attention/ops/int4_per_token_head.py`; for TurboQuant (arXiv 2504.19874)
  `vllm/v1/attention/ops/triton_turboquant_store.py`, `triton_turboquant_decode.py` and
  `vllm/model_executor/layers/quantization/turboquant/`; for NVFP4
  `csrc/nvfp4_kv_cache_kernels.cu`. Its FP8 cache is SGLang's, too;
* KVarN (arXiv 2606.03458), a fork of vLLM: `vllm/v1/attention/ops/kvarn_store.py`,
  `kvarn_decode.py` and `triton_kvarn_sinkhorn.py`;
* ExLlamaV3: `exllamav3/exllamav3_ext/cache/q_cache_kernels.cuh`, without its compander, which is
  off by default;
* LMDeploy: `lmdeploy/pytorch/kernels/cuda/fill_kv_cache.py`, `flatten_kv_cache.py` and
  `turbo_quant.py`;
* MLX, whose `mx.quantize` stores the cache of mlx-lm: `mlx/backend/cpu/quantized.cpp`.

16-bit scales have the model's dtype in engines, and are always float16 here.
"""

import math
from functools import cache

import torch

from rotationzoo.linalg.hadamard import hadamard

BLOCK = 32
"""Channels that share a scale in llama.cpp and ExLlamaV3."""
MLX_GROUP = 64
"""Channels that share a scale in mlx-lm, unless `--kv-group-size` says otherwise."""
NVFP4_BLOCK = 16
"""Channels that share a scale in NVFP4."""
TILE = 128
"""Successive tokens that KVarN quantizes together."""
_FP8_LARGEST = 448.0
_E2M1_LARGEST = 6.0
_SIGN_SEED = 0x9E3779B9  # of vLLM's random signs
_ITERATIONS = 1000  # enough for Lloyd-Max centroids of 4 bits to converge to 1e-9
_TILE_ITERATIONS = 16
_TILE_SCALES = math.exp(-0.3), math.exp(10)  # the least and the largest scale of a KVarN tile


def read_q8_0(rows: torch.Tensor) -> torch.Tensor:
    """llama.cpp's q8_0: blocks of 32 channels with codes -127 to 127 and a float16 scale."""
    blocks = torch.unflatten(rows, -1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = _round_away(blocks * _reciprocal(scale))
    return (codes * _as_half(scale)).flatten(-2)


def read_q4_0(rows: torch.Tensor) -> torch.Tensor:
    """llama.cpp's q4_0: blocks of 32 channels, codes -8 to 7 (-8: the largest), float16 scale."""
    blocks = torch.unflatten(rows, -1, (-1, BLOCK))
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    codes = (blocks * _reciprocal(scale) + 8.5).trunc().clamp(max=15)
    return ((codes - 8) * _as_half(scale)).flatten(-2)


def read_fp8(rows: torch.Tensor) -> torch.Tensor:
    """FP8 (e4m3) with the scale 1, which saturates."""
    return rows.clamp(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn).float()


def read_int4_per_token_head(rows: torch.Tensor) -> torch.Tensor:
    """vLLM's `int4_per_token_head`: random signs, an unnormalized Hadamard matrix, then codes 0 to
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
    Lloyd-Max centroids and normalized again, and the row's norm in float16."""
    matrix = hadamard(rows.shape[-1]).to(rows.device, torch.float32)
    norm = rows.norm(dim=-1, keepdim=True)
    rotated = rows / (norm + 1e-8) @ matrix
    centroids, midpoints = _unit_centroids(rows, bits)
    directions = centroids[torch.bucketize(rotated, midpoints, right=True)]
    directions = directions / directions.square().sum(-1, keepdim=True).add(1e-16).sqrt()
    return directions * _as_half(norm) @ matrix.mT


@cache
def gaussian_centroids(bits: int) -> torch.Tensor:
    """The `2^bits` centroids of N(0, 1) with the least mean squared error, ascending, float64:
    the Lloyd-Max quantizer (Lloyd 1982, Max 1960), which TurboQuant rounds keys with.

    Each centroid is the mean of the distribution between the midpoints to its neighbors. The mean
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
    """TurboQuant's values in vLLM: unrotated, with a minimum and a scale a row in float16."""
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


def read_lmdeploy(rows: torch.Tensor, bits: int, with_signs: bool) -> torch.Tensor:
    """LMDeploy's TurboQuant: a row's direction, rotated and rounded to Lloyd-Max centroids, and its
    norm in float16. `with_signs`, as for keys, adds a bit for the side of the centroid, and their
    rms."""
    dim = rows.shape[-1]
    matrix = hadamard(dim).to(rows.device, torch.float32)
    norm = (rows.square().sum(-1, keepdim=True) + 1e-8).sqrt()
    directions = rows @ matrix / norm
    centroids, midpoints = _unit_centroids(rows, bits)
    levels = centroids[torch.bucketize(directions, midpoints)]
    if with_signs:
        rest = directions - levels
        rms = ((rest.square().sum(-1, keepdim=True) + 1e-8) / dim).sqrt()
        levels = levels + torch.where(rest >= 0, 1, -1) * _as_half(rms)
    return levels * _as_half(norm) @ matrix.mT


def read_mlx(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """`mx.quantize`: groups of 64 channels with a scale and a bias. The bias is the end of the
    range that is farther from 0, and the scale is changed so that a code stands for 0."""
    groups = torch.unflatten(rows, -1, (-1, MLX_GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    steps = (1 << bits) - 1
    scale = ((high - low) / steps).clamp(min=1e-7)
    downwards = low.abs() <= high.abs()
    scale, bias = torch.where(downwards, -scale, scale), torch.where(downwards, high, low)
    zero = (bias / scale).round()
    scale, bias = torch.where(zero == 0, scale, bias / zero), torch.where(zero == 0, 0, bias)
    codes = ((groups - bias) / scale).round().clamp(0, steps)
    return (codes * _as_half(scale) + _as_half(bias)).flatten(-2)


def read_nvfp4(rows: torch.Tensor) -> torch.Tensor:
    """NVFP4: blocks of 16 channels with e2m1 codes, whose magnitudes are 0 to 6, and an e4m3 scale.

    A checkpoint's float32 scale per tensor brings block scales into the range of e4m3. Here it is
    an ideal power of two, so that block scales are rounded to four significant bits.
    """
    blocks = torch.unflatten(rows, -1, (-1, NVFP4_BLOCK))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / _E2M1_LARGEST)
    scale = torch.ldexp((mantissa * 16).round() / 16, exponent)
    steps = (blocks * _reciprocal(scale)).clamp(-_E2M1_LARGEST, _E2M1_LARGEST)
    # A code has one bit after its leading one, and steps of 1/2 below 1.
    exponent = torch.frexp(steps).exponent.clamp(min=1) - 2
    codes = torch.ldexp(torch.ldexp(steps, -exponent).round(), exponent)
    return (codes * scale).flatten(-2)


def read_kvarn(rows: torch.Tensor, bits: int, per_channel: bool) -> torch.Tensor:
    """KVarN: rows `[..., T, D]` times a Hadamard matrix, in tiles of 128 tokens scaled by
    `scale_tile`. Codes have a minimum and scale `per_channel` (keys) or token (values), all
    float16."""
    matrix = hadamard(rows.shape[-1]).to(rows.device, torch.float32)
    tiles = torch.unflatten(rows @ matrix, -2, (-1, TILE))
    tiles = tiles.mT if per_channel else tiles
    across, along = scale_tile(tiles)
    balanced = tiles / across / along
    low, high = balanced.amin(-1, keepdim=True), balanced.amax(-1, keepdim=True)
    steps = (1 << bits) - 1
    scale = ((high - low) / steps).clamp(min=1e-10)
    codes = ((balanced - low) / scale).round().clamp(0, steps)
    stored = (codes * _as_half(along * scale) + _as_half(along * low)) * _as_half(across)
    stored = stored.mT if per_channel else stored
    return stored.flatten(-3, -2) @ matrix.mT


def scale_tile(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of columns `[..., 1, C]` and of rows `[..., R, 1]` by which KVarN divides tiles
    `[..., R, C]`, so that all of them have similar standard deviations.

    Both are divided by their standard deviations in turn; the least `_imbalance` counts.
    """
    columns, rows = torch.ones_like(tiles[..., :1, :]), torch.ones_like(tiles[..., :1])
    best, least = (columns, rows), _imbalance(tiles)
    for _ in range(_TILE_ITERATIONS):
        columns = _scale_on(columns, (tiles / columns / rows).std(-2, keepdim=True))
        rows = _scale_on(rows, (tiles / columns / rows).std(-1, keepdim=True))
        imbalance = _imbalance(tiles / columns / rows)
        better = imbalance <= least
        best = torch.where(better, columns, best[0]), torch.where(better, rows, best[1])
        least = torch.minimum(imbalance, least)
    return best


def _scale_on(scales: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    return (scales * deviations.clamp(1e-3, 1e3)).clamp(*_TILE_SCALES)


def _imbalance(tiles: torch.Tensor) -> torch.Tensor:
    """How unequal standard deviations of columns and rows are: their ratios, `[..., 1, 1]`."""
    ratios = []
    for axis in (-2, -1):
        deviations = tiles.std(axis, keepdim=True)
        largest, least = deviations.amax((-2, -1), True), deviations.amin((-2, -1), True)
        ratios.append(largest / least.clamp(min=1e-8))
    return ratios[0] + ratios[1]


def _unit_centroids(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The Lloyd-Max centroids of the channels of a random direction, and their midpoints."""
    deviation = rows.shape[-1] ** -0.5
    centroids = (gaussian_centroids(bits) * deviation).to(rows.device, torch.float32)
    return centroids, (centroids[1:] + centroids[:-1]) / 2


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
