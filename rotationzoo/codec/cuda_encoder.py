"""Rows quantized on an NVIDIA GPU, as `int2.quantize` defines it, without waiting for the GPU."""

import importlib.util
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from rotationzoo.codec import cuda, int2
from rotationzoo.codec.kernels.parameters import Quantize
from rotationzoo.errors import RotationZooError

_OLDEST_GPU = 8, 0  # the compute capability that the kernels need


@dataclass(frozen=True, eq=False)
class Encoder:
    """Quantizes rows of one side of a layer; `clip_encoder` makes one."""

    variant: cuda.Variant
    kernel: cuda.Kernel
    inputs: dict[str, Any]
    """The tensors that the kernel reads in addition to the rows, by the names of its arguments."""
    refused: torch.Tensor
    """Set on the GPU if a row is not finite or too large."""

    def __call__(self, rows: torch.Tensor) -> int2.Quantized:
        """The packed codes `[B, H, T, row bytes]` of rows `[B, H, T, D]`, with their scales and
        offsets `[B, H, T, G]`, bit-equal to the definition's."""
        packed = self.store(rows.transpose(0, 1).flatten(1, 2))
        parts = packed.codes, *packed.metadata.unbind(-1)
        by_row = (part.unflatten(1, (len(rows), -1)).transpose(0, 1) for part in parts)
        return int2.Quantized(*by_row)

    def store(self, rows: torch.Tensor, rotated: torch.Tensor | None = None) -> cuda.Packed:
        """Quantize and pack rows `[H, N, D]` of the variant's type. `rotated` `[H, N, D]` float32,
        if given, receives the products with the rotation."""
        (heads, count, dim), format = rows.shape, self.variant.format
        codes = rows.new_empty(heads, count, dim // 4, dtype=torch.uint8)
        shape, number = (heads, count, dim // self.variant.group, 2), format.metadata
        metadata = rows.new_empty(shape, dtype=int2.METADATA_TYPES[number])
        rows = rows.contiguous()
        named = self.inputs | {"codes": codes, "metadata": metadata, "rows": rows}
        self.kernel(rows, Quantize(**named, length=count, refused=self.refused, rotated=rotated))
        return cuda.Packed(codes, metadata, format)

    def check(self) -> None:
        """Wait for the GPU; raise `RotationZooError` if it refused a row since the last call."""
        if self.refused.item():
            self.refused.zero_()
            raise int2.refusal()


def clip_encoder(
    clip: torch.Tensor,
    variant: cuda.Variant,
    device: torch.device,
    rotation: torch.Tensor | None = None,
) -> Encoder:
    """An encoder with clip ratios `[H]`. `rotation` `[H, D, D]`, if given, multiplies the rows
    first. Raises `RotationZooError` for shapes and types that the kernel does not support."""
    entry, weight = int2.clip_position(clip, variant.dim, variant.format.interpolated)
    matrix = None if rotation is None else rotation.float().contiguous()
    variant = replace(variant, clips=bool((clip < 1).any()), rotates=matrix is not None)
    kernel = cuda.compiled("quantize", variant, device)
    inputs = {"rotation": matrix, "ranks": entry.int().to(device), "weights": weight.to(device)}
    refused = torch.zeros((), dtype=torch.int32, device=device)
    return Encoder(variant, kernel, inputs, refused)


def supports(variant: cuda.Variant) -> bool:
    """Whether the kernels quantize rows of this shape, type and format."""
    try:
        variant.macros()
    except RotationZooError:
        return False
    return True


@cache
def kernels_run_on(device: torch.device) -> bool:
    """Whether this machine can compile kernels for a device and run them there."""
    if device.type != "cuda" or not importlib.util.find_spec("cuda"):
        return False
    has_package = importlib.util.find_spec("cuda.core") is not None
    return has_package and torch.cuda.get_device_capability(device) >= _OLDEST_GPU
