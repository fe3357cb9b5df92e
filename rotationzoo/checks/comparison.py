"""The CUDA kernels beside the codec's definition, on the rows of one side of one layer after
another: codes and values bit by bit, rotations within the error of float32."""

from dataclasses import dataclass, field
from typing import Any

import torch

from rotationzoo.checks.rows import rows_of_each_type
from rotationzoo.codec import cuda, int2
from rotationzoo.errors import RotationZooError

_HINT = "do not publish; report the GPU, the driver and this line as an issue"
_FLOAT32_ROUNDING = 2.0**-24
_SMALLEST_BOUND = 1e-37  # where a row is zero: products below it are subnormal in float32
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of as many bytes, to compare floats by their bits: -0 is not 0, and NaN equals NaN."""


@dataclass
class KernelComparison:
    """What was compared so far. Any difference raises `RotationZooError` at once."""

    group_size: int | None
    on_gpu: bool
    """Without a GPU only the definition is checked, against itself."""
    rows: int = 0
    elements: int = 0
    rotation_error: float = 0.0
    """The largest error of a rotation, relative to the bound for float32."""
    _name: str = field(default="", init=False)

    def compare(
        self, name: str, rows: torch.Tensor, rotation: torch.Tensor, clip: torch.Tensor
    ) -> None:
        """Compare on rows `[H, N, D]` that are not rotated yet, with rotations `[H, D, D]` and clip
        ratios `[H]`. `name` says in errors which layer and side it is."""
        self._name = name
        self.rows += rows.shape[0] * rows.shape[1]
        if self.on_gpu:
            self._compare_kernel(rows, rotation, clip)
        else:
            self._check_definition(rows, rotation, clip)

    def report(self) -> dict[str, Any]:
        """The keys of `validate --json` that come from comparing; speeds are measured elsewhere."""
        device, equal, difference = "cpu", None, None
        if self.on_gpu:  # and nothing differs: a difference has raised
            device, equal, difference = torch.cuda.get_device_name(), True, 0.0
        return {
            "device": device,
            "on_gpu": self.on_gpu,
            "rows": self.rows,
            "elements": self.elements,
            "codes_equal": equal,
            "dequantized_equal": equal,
            "max_difference": difference,
            "rotation_error": self.rotation_error,
            "formats": list(int2.FORMATS),
            "quantize_bytes_per_second": None,
            "dequantize_bytes_per_second": None,
            "copy_bytes_per_second": None,
        }

    def _compare_kernel(
        self, rows: torch.Tensor, rotation: torch.Tensor, clip: torch.Tensor
    ) -> None:
        rotated = torch.empty(rows.shape, device="cuda")
        # A model hands over keys and values in bfloat16; the rotation is applied to these.
        narrow = rows.bfloat16()
        for format in int2.FORMATS.values():
            packed = cuda.quantize(
                narrow.cuda(), clip, self.group_size, format, rotation.cuda(), rotated
            )
            # The definition goes on from the rows that the kernel rotated: a sum in another order
            # is allowed, and would now and then round to another code.
            self._check_product("rotation", rotated.cpu(), narrow, rotation)
            expected = self._check_quantized(packed, rotated.cpu(), clip, format)
            restored = cuda.dequantize(packed, torch.float32, rotation.cuda()).cpu()
            dequantized = int2.dequantize(expected, format)
            self._check_product("inverse rotation", restored, dequantized, rotation.mT)
            for typed in rows_of_each_type(rotated.cpu()):
                packed = cuda.quantize(typed.cuda(), clip, self.group_size, format)
                self._check_quantized(packed, typed, clip, format)

    def _check_definition(
        self, rows: torch.Tensor, rotation: torch.Tensor, clip: torch.Tensor
    ) -> None:
        """Check what holds of the definition itself: rotations are within the error of float32,
        and packing loses no code."""
        rotated = rows @ rotation
        self._check_product("rotation", rotated, rows, rotation)
        for format in int2.FORMATS.values():
            codes = int2.quantize(rotated, clip[:, None], self.group_size, format).codes
            unpacked = int2.unpack(int2.pack(codes, format.packing), format.packing)
            self._check_equal("packed code", unpacked, codes)
            self.elements += rows.numel()

    def _check_quantized(
        self, packed: cuda.Packed, rows: torch.Tensor, clip: torch.Tensor, format: int2.Format
    ) -> int2.Quantized:
        """Check that the kernel stores rotated rows as the definition does, which is returned."""
        expected = int2.quantize(rows, clip[:, None], self.group_size, format)
        codes = int2.unpack(packed.codes.cpu(), format.packing)
        self._check_equal("code", codes, expected.codes)
        metadata = torch.stack([expected.scale, expected.offset], dim=-1)
        self._check_equal("scale or offset", packed.metadata.cpu(), metadata)
        for dtype in cuda.TYPES:
            values = cuda.dequantize(packed, dtype).cpu()
            defined = int2.dequantize(expected, format).to(dtype)
            self._check_equal("dequantized value", values, defined)
        self.elements += rows.numel()
        return expected

    def _check_equal(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Bit by bit."""
        bits = _SAME_SIZE[expected.element_size()]
        different = (actual.view(bits) != expected.view(bits)).nonzero()
        if len(different):
            where = tuple(different[0].tolist())
            raise RotationZooError(
                f"{self._name}, head {where[0]}, row {where[1]}: the kernel's {what} is "
                f"{actual[where].item()!r} and the definition's is {expected[where].item()!r} "
                f"({len(different)} differ)",
                hint=_HINT,
            )

    def _check_product(
        self, what: str, actual: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor
    ) -> None:
        """Hold `rows @ matrix` as computed in float32 against float64. A product of D terms is off
        by at most D 2^-24 |x| |R| (Higham 2002, section 3.1)."""
        rows, matrix = rows.double(), matrix.double()
        allowed = rows.shape[-1] * _FLOAT32_ROUNDING * (rows.abs() @ matrix.abs())
        error = (actual.double() - rows @ matrix).abs() / (allowed + _SMALLEST_BOUND)
        worst = error.max().item()
        self.rotation_error = max(self.rotation_error, worst)
        if not worst <= 1:  # and not `worst > 1`, which a NaN would pass
            head, row, _ = torch.unravel_index(error.argmax(), error.shape)
            raise RotationZooError(
                f"{self._name}, head {head}, row {row}: the kernel's {what} is off by {worst:.2g} "
                "times what float32 allows",
                hint=_HINT,
            )
