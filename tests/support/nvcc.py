"""What nvcc says of the kernels of a variant, for three generations of GPUs."""

import subprocess
from pathlib import Path

from rotationzoo.codec import cuda

GENERATIONS = 80, 90, 100


def spilled_registers(variant: cuda.Variant, folder: Path) -> list[str]:
    """The line on spilled registers of each kernel, and of each generation."""
    source = folder / "kernels.cu"
    source.write_text(variant.source)
    macros = [f"-D{name}={value}" for name, value in variant.macros()]
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in GENERATIONS]
    files = ["-o", str(folder / "out"), str(source)]
    command = ["nvcc", "-fatbin", "-Xptxas=-v", *targets, *macros, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return [line.strip() for line in done.stderr.splitlines() if "spill stores" in line]
