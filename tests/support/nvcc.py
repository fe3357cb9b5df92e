"""What nvcc says of the kernels of a variant, for three generations of GPUs."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from rotationzoo.codec import cuda

GENERATIONS = 80, 90, 100


def spilled_registers(variant: cuda.Variant, folder: Path) -> list[str]:
    """The line on spilled registers of each kernel, and of each generation."""
    output = compile_kernels(variant.source, variant.macros(), folder)
    return [line.strip() for line in output.splitlines() if "spill stores" in line]


def compile_kernels(
    text: str,
    macros: Iterable[tuple[str, str]],
    folder: Path,
    generations: Iterable[int] = GENERATIONS,
) -> str:
    """What nvcc writes when it compiles a source with these macros, which must be no warning."""
    source = folder / "kernels.cu"
    source.write_text(text)
    defined = [f"-D{name}={value}" for name, value in macros]
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in generations]
    files = ["-o", str(folder / "out"), str(source)]
    command = ["nvcc", "-fatbin", "-Xptxas=-v", *targets, *defined, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return done.stderr
