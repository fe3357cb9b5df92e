"""The CUDA kernel of error feedback: equal to its definition on a CPU, which runs the same source,
and on a GPU; tests/codec/test_cuda.py has the other kernels."""

from dataclasses import replace

import pytest
import torch
from support.codec import assert_stored, on_cpu, on_gpu
from support.recipes import QUICK

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.comparison import draw_rows, rows_of_each_type
from rotationzoo.checks.kernel import validate_kernel
from rotationzoo.codec import cuda, cuda_encoder, cuda_rows, feedback, int2
from rotationzoo.codec.formats import FINE
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.error_feedback import factorize
from rotationzoo.recipe import Data

FORMATS = int2.FORMATS | {
    "fine": FINE,
    "fine, 240 channels": replace(FINE, fine_channels=240),
    "one scale": replace(FINE, fine_channels=0),
    "4 bits": replace(FINE, fine_channels=0, bits=4),
    "8 bits": replace(int2.FORMATS["vllm"], bits=8),
}
# Every type and format; groups that are the row, that hold blocks of 16 channels, and that split
# them; rows too long for shared memory.
COMPILED = [
    (128, 128, torch.bfloat16, "sglang"), (64, 4, torch.float16, "sglang"),
    (80, 20, torch.float32, "vllm"), (96, 32, torch.bfloat16, "mlx"),
    (320, 64, torch.float32, "mlx"), (128, 128, torch.float32, "fine"),
    (64, 64, torch.bfloat16, "fine"), (320, 32, torch.float32, "fine, 240 channels"),
    (80, 80, torch.float16, "one scale"), (64, 64, torch.float32, "4 bits"),
    (128, 32, torch.bfloat16, "8 bits"),
]  # fmt: skip


def metrics(dim: int) -> torch.Tensor:
    """Metrics `[5, D, D]`: eigenvalues that fall like 1 / n, four directions alone, none, all
    channels alike, and channels of very different weight."""
    generator = torch.Generator().manual_seed(dim)
    normal = torch.randn(3 * dim, dim, generator=generator).double()
    basis = torch.linalg.qr(normal[:dim]).Q
    falling = basis @ torch.diag(1 / torch.arange(1, dim + 1)).double() @ basis.mT
    weighted = normal * torch.randn(dim, generator=generator).double().mul(2).exp()
    ones = torch.ones(dim, dim).double()
    return torch.stack(
        [falling, normal[:4].mT @ normal[:4], 0 * ones, 1e20 * ones, weighted.mT @ weighted]
    )


def hostile_rows(dim: int) -> torch.Tensor:
    """Rows `[5, N, D]`, float32: heavy tails, ties, magnitudes of all exponents, subnormal numbers,
    and a small range on a large offset."""
    generator = torch.Generator().manual_seed(dim)
    shape = 5, 16, dim
    normal = torch.randn(shape, generator=generator)
    ties = torch.randint(-6, 7, shape, generator=generator) / 2
    exponents = torch.randint(-120, 60, shape, generator=generator).float()
    subnormal = torch.randint(-50, 51, shape, generator=generator) * 2.0**-149
    heavy = draw_rows(None, 5, 16, dim, seed=dim)
    return torch.cat([heavy, ties, normal * exponents.exp2(), subnormal, 300 + normal], dim=1)


def sample(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Hostile rows of this type behind edge rows."""
    every = {rows.dtype: rows for rows in rows_of_each_type(hostile_rows(dim))}
    return every[dtype]


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
@pytest.mark.parametrize(("dim", "group", "dtype", "format"), COMPILED)
def test_the_source_run_on_a_cpu_is_the_definition(dim, group, dtype, format, monkeypatch):
    monkeypatch.setattr(cuda_encoder, "_FEW", 0)
    rows, factor = sample(dim, dtype)[:, ::4], factorize(metrics(dim))
    packed = cuda_rows.quantize_with_feedback(rows, factor, group, FORMATS[format])
    assert_stored(packed, feedback.quantize(rows, factor, group, FORMATS[format]), FORMATS[format])


@on_cpu
@pytest.mark.usefixtures("source_on_cpu")
@pytest.mark.parametrize("number", [float("nan"), -2e18])
def test_the_source_run_on_a_cpu_refuses_what_the_definition_does(number, monkeypatch):
    monkeypatch.setattr(cuda_encoder, "_FEW", 0)
    rows = torch.ones(1, 3, 16)
    rows[0, 1, 15] = number
    with pytest.raises(RotationZooError, match="is not finite or exceeds"):
        cuda_rows.quantize_with_feedback(rows, factorize(torch.zeros(1, 16, 16)))


@pytest.mark.parametrize(
    ("factor", "problem"),
    [
        (torch.eye(64)[None], r"is \[1, 64, 64\] and not \[2, 64, 64\]"),
        (torch.full((2, 64, 64), float("inf")), "is not finite"),
    ],
)
def test_factors_that_do_not_belong_to_the_rows_are_refused(factor, problem):
    with pytest.raises(RotationZooError, match=problem):
        cuda_rows.quantize_with_feedback(torch.ones(2, 3, 64), factor)


def test_shapes_that_the_kernel_does_not_take_are_refused():
    with pytest.raises(RotationZooError, match="the CUDA kernel has no rows of 72"):
        cuda_rows.quantize_with_feedback(torch.ones(1, 3, 72), torch.eye(72)[None])


@on_gpu
@pytest.mark.parametrize("few", [0, 10**9], ids=["a thread a row", "a block a row"])
@pytest.mark.parametrize(("dim", "group", "dtype", "format"), COMPILED)
def test_codes_are_those_of_the_definition(device, dim, group, dtype, format, few, monkeypatch):
    monkeypatch.setattr(cuda_encoder, "_FEW", few)
    rows, factor = sample(dim, dtype), factorize(metrics(dim))
    packed = cuda_rows.quantize_with_feedback(rows.to(device), factor, group, FORMATS[format])
    expected = feedback.quantize(rows, factor, group, FORMATS[format])
    assert_stored(packed, expected, FORMATS[format])
    definition = int2.dequantize(expected, FORMATS[format])
    assert torch.equal(cuda_rows.dequantize(packed).cpu(), definition)
    moved = feedback.quantize(rows.to(device), factor.to(device), group, FORMATS[format])
    assert_stored(packed, moved, FORMATS[format])


@on_gpu
@pytest.mark.parametrize("few", [0, 10**9], ids=["a thread a row", "a block a row"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -2e18])
def test_rows_outside_the_domain_are_refused(device, number, few, monkeypatch):
    monkeypatch.setattr(cuda_encoder, "_FEW", few)
    rows = torch.ones(1, 300, 64, device=device)
    rows[0, 217, 50] = number
    with pytest.raises(RotationZooError, match="not finite or exceeds"):
        cuda_rows.quantize_with_feedback(rows, factorize(metrics(64)[:1]))


def with_factors(folder):
    recipe = QUICK.model_copy(update={"data": Data(tokens=2048, length=512)})
    return calibrate(Job("demo", recipe, folder, device="cpu"))


@on_gpu
def test_validation_compares_both_encoders(device, tmp_path):
    artifact = with_factors(tmp_path / "artifact")
    report = validate_kernel(artifact, rows=64)
    layers, heads = 4, 2
    assert report["feedback_rows"] == layers * heads * 2 * 64, "keys and values"
    source = (artifact.folder / "feedback.cu").read_bytes()
    assert source == cuda.FEEDBACK_SOURCE.read_bytes()


@on_gpu
def test_a_kernel_that_differs_is_found(device, tmp_path, monkeypatch):
    wrong = tmp_path / "wrong.cu"
    text = cuda.FEEDBACK_SOURCE.read_text()
    text = text.replace("total[r] < total[0]", "total[r] <= 0.9f * total[0]")
    wrong.write_text(text.replace("totals[r] < least", "totals[r] <= 0.9f * least"))
    monkeypatch.setattr(cuda, "FEEDBACK_SOURCE", wrong)
    cuda.compiled.cache_clear()
    artifact = with_factors(tmp_path / "artifact")
    try:
        with pytest.raises(
            RotationZooError, match=r"layers\.\d\.key, head \d, row \d+: the kernel's"
        ):
            validate_kernel(artifact, rows=256)
    finally:
        cuda.compiled.cache_clear()
