"""Validation of the CUDA reference kernel against the codec's definition, bit by bit, for every
layer and head."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rotationzoo.artifact.layout import side_name
from rotationzoo.artifact.store import Artifact
from rotationzoo.codec import cuda, cuda_rows, int2, kernels
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers
from rotationzoo.linalg import compositions
from rotationzoo.linalg.moments import Average
from rotationzoo.progress import Progress, silent
from rotationzoo.writer import add_files, check_writable

EDGE_ROWS = 8
_TAIL_DEGREES = 3  # degrees of freedom of the Student t of drawn rows, for heavy tails
_HINT = "do not publish; report the GPU, the driver and this line as an issue"
_FLOAT32_ROUNDING = 2.0**-24
_SMALLEST_BOUND = 1e-37  # for rows of zeros: smaller products are subnormal in float32
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes -> integer type


def draw_rows(moments: Average | None, heads: int, count: int, dim: int, seed: int) -> torch.Tensor:
    """Heavy-tailed random rows `[heads, count, dim]`, float32: multivariate Student t with the mean
    and covariance of `moments`, or standard."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(heads, count, dim, generator=generator, dtype=torch.float64)
    degrees = torch.randn(heads, count, _TAIL_DEGREES, generator=generator, dtype=torch.float64)
    tail = (_TAIL_DEGREES / degrees.square().sum(-1, keepdim=True)).sqrt()
    if moments is None:
        return (normal * tail).float()
    mean, second = moments.mean, moments.second_moment
    assert mean is not None, "keys and values of a calibration have a mean"
    eigenvalues, vectors = compositions.eigenbasis(second - mean.unsqueeze(-1) * mean.unsqueeze(-2))
    # Rounding can push eigenvalues of a singular covariance slightly below 0.
    root = vectors * eigenvalues.clamp(min=0).sqrt().unsqueeze(-2)
    rows: torch.Tensor = mean.unsqueeze(1) + tail * (normal @ root.mT)
    return rows.float()


def edge_rows(dim: int, largest: float) -> torch.Tensor:
    """Rows `[EDGE_ROWS, dim]` at the edges of the codec's domain, of magnitudes up to `largest`."""
    rows = torch.zeros(EDGE_ROWS, dim)
    rows[1] = 0.37
    rows[2, dim // 3] = -5.0
    rows[3] = 1e-40 * torch.arange(dim)
    rows[4] = largest * torch.linspace(-1, 1, dim)
    rows[5] = largest
    rows[6] = 1000 + 1e-3 * torch.arange(dim)
    rows[7] = torch.arange(dim) % 4
    return rows


def rows_of_each_type(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Edge rows followed by the rows `[H, N, D]`, in every dtype that the kernel reads."""
    for dtype in cuda.TYPES:
        # Rounding to bfloat16 may add 1/256, which must stay within the codec's domain.
        largest = min(int2.LARGEST, torch.finfo(dtype).max) * 0.99
        edges = edge_rows(rows.shape[-1], largest).expand(len(rows), -1, -1)
        yield torch.cat([edges, rows.clamp(-largest, largest)], dim=1).to(dtype)


@dataclass
class KernelComparison:
    """A running comparison and its totals. Any difference raises `RotationZooError` at once."""

    group_size: int | None
    rows: int = 0
    elements: int = 0
    rotation_error: float = 0.0  # the largest of a rotation, as a fraction of the bound for float32
    name: str = ""  # of the layer and side that are compared, for error messages

    def compare(
        self, name: str, rows: torch.Tensor, rotation: torch.Tensor, clip: torch.Tensor
    ) -> None:
        """Compare on unrotated rows `[H, N, D]`, rotations `[H, D, D]` and clip ratios `[H]`."""
        self.name = name
        self.rows += rows.shape[0] * rows.shape[1]
        rotated = torch.empty(rows.shape, device="cuda")
        # The kernel rotates bfloat16, as models produce it.
        narrow = rows.bfloat16()
        for format in int2.FORMATS.values():
            packed = cuda_rows.quantize(
                narrow.cuda(), clip, self.group_size, format, rotation.cuda(), rotated
            )
            # The definition quantizes the rows that the kernel rotated. If it rotated them itself,
            # sums in another order, which are allowed, would sometimes round to another code.
            self._check_product("rotation", rotated.cpu(), narrow, rotation)
            expected = self._check_quantized(packed, rotated.cpu(), clip, format)
            restored = cuda_rows.dequantize(packed, torch.float32, rotation.cuda()).cpu()
            dequantized = int2.dequantize(expected, format)
            self._check_product("inverse rotation", restored, dequantized, rotation.mT)
            for typed in rows_of_each_type(rotated.cpu()):
                packed = cuda_rows.quantize(typed.cuda(), clip, self.group_size, format)
                self._check_quantized(packed, typed, clip, format)

    def _check_quantized(
        self, packed: cuda.Packed, rows: torch.Tensor, clip: torch.Tensor, format: int2.Format
    ) -> int2.Quantized:
        """Check how the kernel stores and restores rotated rows. Returns what it should store."""
        expected = int2.quantize(rows, clip[:, None], self.group_size, format)
        codes = int2.unpack(packed.codes.cpu(), format)
        self._check_equal("code", codes, expected.codes)
        metadata = torch.stack([expected.scale, expected.offset], dim=-1)
        self._check_equal("scale or offset", packed.metadata.cpu(), metadata)
        for dtype in cuda.TYPES:
            values = cuda_rows.dequantize(packed, dtype).cpu()
            defined = int2.dequantize(expected, format).to(dtype)
            self._check_equal("dequantized value", values, defined)
        self.elements += codes.numel()
        return expected

    def _check_equal(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise `RotationZooError` unless the bits are equal: -0 is not 0, and NaN equals NaN."""
        bits = _SAME_SIZE[expected.element_size()]
        different = (actual.view(bits) != expected.view(bits)).nonzero()
        if len(different):
            where = tuple(different[0].tolist())
            values = f"{actual[where].item()!r} and the definition's is {expected[where].item()!r}"
            place = f"{self.name}, head {where[0]}, row {where[1]}"
            words = f"the kernel's {what} is {values} ({len(different)} differ)"
            raise RotationZooError(f"{place}: {words}", _HINT)

    def _check_product(
        self, what: str, actual: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor
    ) -> None:
        """Check `rows @ matrix` in float32 against float64: the error of a dot product of D terms
        is at most D 2^-24 |x| |R| (Higham 2002, section 3.1)."""
        rows, matrix = rows.double(), matrix.double()
        allowed = rows.shape[-1] * _FLOAT32_ROUNDING * (rows.abs() @ matrix.abs())
        error = (actual.double() - rows @ matrix).abs() / (allowed + _SMALLEST_BOUND)
        worst = error.max().item()
        self.rotation_error = max(self.rotation_error, worst)
        if not worst <= 1:  # `worst > 1` would let NaN pass
            head, row, _ = torch.unravel_index(error.argmax(), error.shape)
            off = f"the kernel's {what} is off by {worst:.2g} times what float32 allows"
            raise RotationZooError(f"{self.name}, head {head}, row {row}: {off}", _HINT)


VALIDATION, SOURCE = "validation.json", "int2.cu"


def validate_kernel(
    artifact: Artifact, rows: int = 1024, progress: Progress = silent
) -> dict[str, Any]:
    """Compare the kernel with the codec's definition on `rows` rows of every layer, KV head and
    side, and return the report, which is added to the artifact with the source that ran. Raises
    `RotationZooError` at the first difference, and without a GPU."""
    if not torch.cuda.is_available():
        needs = "the CUDA reference needs an NVIDIA GPU, and there is none here"
        problem = f"{artifact.folder} is not validated: {needs}"
        raise RotationZooError(problem, "run it on a machine with one")
    # Fail now if the result could not be saved, not after it was computed.
    check_writable(artifact)
    compared = _compare_layers(artifact, rows, progress)
    summary = {"device": torch.cuda.get_device_name(), "rows": compared.rows}
    report = {
        **summary,
        "elements": compared.elements,
        "rotation_error": compared.rotation_error,
        "formats": list(int2.FORMATS),
        "identity": artifact.identity,
    }
    content = json.dumps(report, indent=2) + "\n"
    files = {VALIDATION: content.encode(), SOURCE: kernels.source_of(SOURCE).encode()}
    add_files(artifact, files, {"validation": summary})
    return report


def _compare_layers(artifact: Artifact, count: int, progress: Progress) -> KernelComparison:
    """Compare on `count` drawn rows of each KV head, after subtracting the artifact's mean."""
    comparison = KernelComparison(artifact.recipe.group_size)
    rotations, averages = artifact.rotations, artifact.statistics
    layers = cached_layers(artifact.geometry)
    done, total = 0, sum(len(layer.sides) for layer in layers)
    progress("validating", done, total)
    for layer in layers:
        for side in layer.sides:
            dim = layer.dims[side]
            rotation = rotations[layer.index][side]
            moments = None if averages is None else averages[layer.index][side]
            # `done` differs for each side of each layer and is the same in every run.
            rows = draw_rows(moments, layer.kv_heads, count, dim, seed=done)
            if rotation.mean is not None:
                rows = rows - rotation.mean[:, None]
            matrices = rotation.matrix.expand(layer.kv_heads, -1, -1)
            name = side_name(layer.index, side)
            comparison.compare(name, rows, matrices, rotation.clip)
            progress("validating", done := done + 1, total)
    return comparison
