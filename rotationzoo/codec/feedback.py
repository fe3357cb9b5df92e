"""Codes chosen by error feedback: the stored format is that of `int2`, and so is the reader, but a
row's codes are chosen together instead of one by one.

Rounding every channel to its nearest code makes each error small. What counts is the error of the
products with queries, `e M e^T` for the error e of a row and the queries' second moment M. Queries
that point in few directions leave the others free, and a rotation cannot use this: all channels of
a row share one scale. Error feedback does. It rounds channel after channel, and moves the channels
that are not yet rounded so that their errors make up for what the earlier ones did. GPTQ (arXiv
2210.17323) and QuIP (arXiv 2307.13304, "LDLQ") round weights this way.
"""

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.formats import SGLANG, Format
from rotationzoo.codec.int2 import Quantized

RANGES = (1.0, 0.9, 0.8, 0.7)
"""Each row is encoded once for every share of the range of its groups, about the middle of the
range, and the codes of the smallest error are stored. This takes the place of a clip ratio."""
PIECE = 2**18
"""Elements that are quantized at a time: more no longer fit into a cache of the processor."""


def quantize(
    rows: torch.Tensor, factor: torch.Tensor, group_size: int | None = None, format: Format = SGLANG
) -> Quantized:
    """Quantize rotated rows `[..., H, T, D]` to codes with their scales and offsets.

    * `factor` `[H, D, D]`, float32: `M = U diag(d) U^T` with U unit upper triangular, stored as U
      with d on its diagonal (`linalg.error_feedback.factorize`);
    * `group_size`: channels that share a scale; None means the whole row.

    For `e` the errors of a row, `e M e^T` is the sum over the channels j of

        d_j (e_j + sum over i < j of e_i U_ij)^2

    so each channel in turn is rounded to the code that makes its own term smallest. Everything is
    float32, and every operation is rounded on its own. Raises `RotationZooError` as `int2.quantize`
    does.
    """
    group = group_size or rows.shape[-1]
    int2.check_shape(rows.shape[-1], group, format)
    rows = rows.float()
    int2.check_values(rows)
    tokens = max(1, PIECE // max(1, rows[..., :1, :].numel()))
    pieces = [_choose(piece, factor, group, format) for piece in rows.split(tokens, dim=-2)]
    return Quantized(*(torch.cat(parts, dim=-2) for parts in zip(*pieces, strict=True)))


def _choose(
    rows: torch.Tensor, factor: torch.Tensor, group: int, format: Format
) -> list[torch.Tensor]:
    """The codes, scales and offsets of the best range of each row."""
    groups = torch.unflatten(rows, -1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    # A tensor, because torch multiplies by a Python number in another precision on a GPU.
    cuts = low.new_tensor([(1 - share) / 2 for share in RANGES])
    cut = (high - low) * cuts.view(-1, *[1] * low.dim())
    # All ranges at once: for the few rows of a decoding step, time is the number of calls.
    tried = rows.expand(len(RANGES), *rows.shape)
    codes, errors = _encode(tried, low + cut, high - cut, factor, format)
    best, smallest = [each[0] for each in codes], errors[0]
    for number in range(1, len(RANGES)):
        better = (errors[number] < smallest)[..., None]
        pairs = zip(codes, best, strict=True)
        best = [torch.where(better, new[number], old) for new, old in pairs]
        smallest = torch.minimum(errors[number], smallest)
    return best


def _encode(
    rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor, factor: torch.Tensor, format: Format
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The codes, scales and offsets of rows whose groups reach from `low` to `high`,
    `[..., H, T, D / group]`, and the error `e M e^T` of each row, `[..., H, T]`."""
    ranges = int2.metadata(low, high, format)
    dim, groups = rows.shape[-1], low.shape[-1]
    largest = int2.largest_codes((groups, dim // groups), format, rows.device).flatten()
    of_channels = int2.spread(*ranges, dim // groups, format)
    # Channels first, so that all rows of one lie together: half the time on a CPU.
    each_channel = (each.expand(*each.shape[:-1], dim // groups) for each in of_channels)
    scales, offsets = (each.flatten(-2).movedim(-1, 0).contiguous() for each in each_channel)
    exact = rows.movedim(-1, 0).contiguous()
    moved, products, total = exact.clone(), torch.empty_like(exact), torch.zeros_like(exact[0])
    codes = torch.empty_like(exact, dtype=torch.uint8)
    shape = -1, *[1] * (total.dim() - 2), len(factor), 1  # [later channels, ..., H, 1]
    for channel in range(dim):
        scale, offset = scales[channel], offsets[channel]
        target = moved[channel]
        code = int2.nearest_codes(target, scale, offset, largest[channel], format)
        restored = code * scale + offset
        if format.offset != "minimum":
            restored = (code - offset) * scale
        codes[channel] = code.to(torch.uint8)
        residual = restored - target
        total = total + factor[:, channel, channel, None] * (residual * residual)
        error = restored - exact[channel]
        later = factor[:, channel, channel + 1 :].mT.reshape(shape)
        moved[channel + 1 :] -= torch.mul(error, later, out=products[channel + 1 :])
    codes = codes.movedim(0, -1).contiguous()
    return [codes, *(int2.store_metadata(number, format) for number in ranges)], total
