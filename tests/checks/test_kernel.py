"""Validating a kernel without a GPU, and what that adds to an artifact; tests/codec/test_cuda.py
has what needs a GPU."""

import json
import shutil

import pytest
import torch

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.kernel import validate_kernel
from rotationzoo.errors import RotationZooError
from rotationzoo.writer import add_files

ON_CPU = {"rows": 64, "device": "cpu"}


@pytest.fixture
def folder(made, tmp_path):
    """A copy of the demo model's artifact, to change."""
    return shutil.copytree(made, tmp_path / "artifact")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_without_a_gpu_the_definition_is_checked_and_the_artifact_stays_as_it_was(folder):
    before = contents(folder)
    report = validate_kernel(Artifact.open(folder), **ON_CPU)
    assert (report["device"], report["on_gpu"], report["codes_equal"]) == ("cpu", False, None)
    layers, sides, heads = 4, 2, 2
    assert report["rows"] == layers * sides * heads * ON_CPU["rows"]
    assert contents(folder) == before


def test_a_report_of_a_gpu_is_kept(folder):
    gpu = {"on_gpu": True, "device": "NVIDIA H200", "rows": 1}
    gpu |= {"codes_equal": True, "dequantized_equal": True}
    add_files(Artifact.open(folder), {"validation.json": b"{}"}, {"validation": gpu})
    validate_kernel(Artifact.open(folder), **ON_CPU)
    assert (folder / "validation.json").read_bytes() == b"{}"
    assert "On NVIDIA H200, `int2.cu` gave" in (folder / "README.md").read_text()


def test_a_wrong_rotation_fails(folder, monkeypatch):
    """The product is compared with one in float64, so a rotation of lower precision is found."""
    exact = torch.Tensor.__matmul__

    def in_bfloat16(rows, matrix):
        if rows.dtype != torch.float32:
            return exact(rows, matrix)
        return exact(rows.bfloat16(), matrix.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", in_bfloat16)
    place = r"layers\.0\.key, head \d, row \d+"
    with pytest.raises(RotationZooError, match=f"{place}: the kernel's rotation is off"):
        validate_kernel(Artifact.open(folder), **ON_CPU)
    assert not (folder / "validation.json").exists()


def test_the_command_line(inside, folder):
    words = ["validate", folder]
    shown = inside(*words, "--json", "--device", "cpu")
    assert shown.returncode == 0
    keys = {"device", "rows", "codes_equal", "dequantized_equal", "max_difference"}
    assert keys | {"copy_bytes_per_second"} <= json.loads(shown.stdout).keys()
    assert "Not validated on a GPU" in inside(*words, "--device", "cpu").stdout
    missing = inside("validate", "nowhere")
    assert missing.returncode == 1
    assert "is no artifact" in missing.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_asks_for_a_cpu(inside, folder):
    before = contents(folder)
    refused = inside("validate", folder)
    assert refused.returncode == 1
    assert "is not validated: the CUDA reference needs an NVIDIA GPU" in refused.stderr
    assert contents(folder) == before
    assert inside("validate", folder, "--device", "cuda").returncode == 2
