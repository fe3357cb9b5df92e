"""What only a CUDA device can show: the same statistics there, offloaded, and spread over two."""

from dataclasses import replace

import pytest
import torch
import transformers
from support.codec import restore
from support.direct_statistics import largest_difference
from support.reports import evaluate
from support.tensors import stored_statistics

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.codec import cuda_rows
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.model.source import DEMO
from rotationzoo.recipe import Data, Recipe

DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")]
RECIPE = Recipe(data=Data(tokens=4096, length=512))


def run(folder, name, model="demo", **options):
    return calibrate(Job(model=str(model), recipe=RECIPE, output=folder / name, **options))


def difference(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> float:
    """The largest relative difference between two sets of statistics."""
    differences = [
        (tensor.double() - actual[name]).norm() / tensor.double().norm()
        for name, tensor in expected.items()
    ]
    return max(differences).item()


def test_statistics_equal_a_direct_computation():
    model = transformers.AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=torch.float32, device_map="cuda"
    )
    ids = torch.randint(2048, (2, 256), generator=torch.Generator().manual_seed(0)).cuda()
    errors = largest_difference(model, [ids], sink=64)
    assert max(errors.values()) < 1e-5, errors


def test_two_runs_write_the_same_bytes_and_agree_with_the_cpu(tmp_path):
    first, second = run(tmp_path, "first"), run(tmp_path, "second")
    assert first.content["run"]["dtype"] == "bfloat16"
    assert first.identity == second.identity
    on_gpu, on_cpu = (
        run(tmp_path, device, device=device, dtype="float32") for device in ("cuda", "cpu")
    )
    assert difference(stored_statistics(on_cpu), stored_statistics(on_gpu)) < 1e-5
    assert verify(on_gpu, "demo").ok


TWO = dict(device_map="auto", max_memory="0=5MB,1=1GB")
# One layer fits the GPU, and two the main memory: the rest stays on disk.
OFFLOADED = dict(device_map="auto", max_memory="0=3MB,cpu=3MB")
two_devices = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("placement", "most"),
    [
        (OFFLOADED, 1e-6),  # float32 kernels differ; measured 3e-7
        pytest.param(TWO, 1e-12, marks=two_devices),  # the same kernels on the same numbers
    ],
    ids=["memory and disk", "two devices"],
)
def test_layers_in_several_places_give_the_same_statistics(tmp_path, placement, most):
    whole = run(tmp_path, "whole", dtype="float32")
    spread = run(tmp_path, "spread", dtype="float32", **placement)
    assert difference(stored_statistics(whole), stored_statistics(spread)) < most


@two_devices
@pytest.mark.parametrize("chunk", [None, 128], ids=["decode", "chunks"])
def test_an_evaluation_over_two_devices_is_that_of_one(tmp_path, chunk):
    """Under sdpa no layer of the demo model is handed a mask: each device needs one of its own."""
    artifact = run(tmp_path, "made", dtype="float32").folder
    job = Evaluation(
        "demo", [artifact], Data(tokens=2048, length=512), dtype="float32", prefill_chunk=chunk
    )
    one, two = evaluate(job), evaluate(replace(job, **TWO))
    assert two["exact"]["perplexity"] == pytest.approx(one["exact"]["perplexity"], rel=1e-6)
    for name, arm in one["arms"].items():
        assert two["arms"][name]["perplexity"] == pytest.approx(arm["perplexity"], rel=1e-4), name


@two_devices
def test_a_kernel_runs_on_the_device_of_its_rows():
    """Compiled for one, a kernel is not what another is handed; and the other need not be the
    current one."""
    rows = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0))
    expected = restore(rows, 0.9)
    for device in ("cuda:0", "cuda:1"):
        packed = cuda_rows.quantize(rows.to(device), 0.9)
        assert torch.equal(cuda_rows.dequantize(packed).cpu(), expected), device
