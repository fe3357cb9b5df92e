"""What only a CUDA device can show: the same statistics there, offloaded, and spread over two."""

import pytest
import torch
import transformers
from check_statistics import largest_difference

from rotationzoo.calibrate import calibrate
from rotationzoo.plan import Job
from rotationzoo.recipe import Data, Recipe
from rotationzoo.source import DEMO
from rotationzoo.verify import verify

DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")]
RECIPE = Recipe(data=Data(tokens=4096, length=512))


def run(folder, name, model="demo", **options):
    return calibrate(Job(model=str(model), recipe=RECIPE, output=folder / name, **options))


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference between two sets of statistics."""
    return max(((one[n].double() - other[n]).norm() / one[n].double().norm()).item() for n in one)


def test_statistics_equal_a_direct_computation():
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, device_map="cuda")
    ids = torch.randint(2048, (2, 256), generator=torch.Generator().manual_seed(0)).cuda()
    errors = largest_difference(model, [ids], sink=64)
    assert max(errors.values()) < 1e-5, errors


def test_two_runs_write_the_same_bytes_and_agree_with_the_cpu(tmp_path):
    one, two = run(tmp_path, "one"), run(tmp_path, "two")
    assert one.manifest["run"]["dtype"] == "bfloat16"
    assert one.identity == two.identity
    on_gpu, on_cpu = (run(tmp_path, device, device=device, dtype="float32") for device in ("cuda", "cpu"))
    assert difference(on_cpu.statistics(), on_gpu.statistics()) < 1e-5
    assert verify(on_gpu, "demo").ok


def test_weights_in_main_memory_or_on_disk(tmp_path):
    """The GPU may hold one layer, main memory two: the rest stays on disk."""
    whole = run(tmp_path, "whole", dtype="float32")
    spread = run(tmp_path, "spread", dtype="float32", device_map="auto", max_memory="0=3MB,cpu=3MB")
    assert difference(whole.statistics(), spread.statistics()) < 1e-6  # float32 kernels differ; measured 3e-7


@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
def test_layers_on_two_devices(tmp_path):
    whole = run(tmp_path, "whole", dtype="float32")
    spread = run(tmp_path, "spread", dtype="float32", device_map="auto", max_memory="0=5MB,1=1GB")
    assert difference(whole.statistics(), spread.statistics()) < 1e-12  # the same kernels on the same numbers
