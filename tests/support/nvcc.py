"""What nvcc says of the kernels of a variant, for three generations of GPUs."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from rotationzoo.codec import cuda

# One front end serves the three: the sources ask for no generation, but for attention.cu.
GENERATIONS = "-gencode=arch=compute_80,code=[sm_80,sm_90,sm_100]"
# What compiles at all is compiled in half the time without optimization.
ONLY_COMPILE = "-gencode=arch=compute_90,code=sm_90", "-Ofc=max"


def spilled_registers(variant: cuda.Variant, folder: Path) -> list[str]:
    """The line on spilled registers of each kernel, and of each generation."""
    assert "__CUDA_ARCH__" not in variant.source
    output = compile_kernels(variant.source, variant.macros(), folder, [GENERATIONS])
    return [line.strip() for line in output.splitlines() if "spill stores" in line]


def compile_kernels(
    text: str, macros: Iterable[tuple[str, str]], folder: Path, options: Iterable[str]
) -> str:
    """What nvcc writes when it compiles a source with these macros, which must be no warning."""
    source = folder / "kernels.cu"
    source.write_text(text)
    defined = [f"-D{name}={value}" for name, value in macros]
    files = ["-o", str(folder / "out"), str(source)]
    command = ["nvcc", "-fatbin", "-Xptxas=-v", *options, *defined, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return done.stderr
