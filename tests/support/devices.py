"""Marks of tests that need a GPU, or a compiler that makes CUDA sources run on a CPU."""

import platform
import shutil

import pytest
import torch

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
on_cpu = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux" or not shutil.which("g++"),
    reason="needs GNU's compiler on Linux and x86",
)
