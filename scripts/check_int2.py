"""Validate the CUDA codec on synthetic artifacts of every head dimension and group size, and
measure its speed.

    python scripts/check_int2.py [--dims 64,128] [--rows 1024] [--speed-only]

Needs an NVIDIA GPU and the packages of `rotationzoo[cuda]`. Ends with the share of a device copy's
bandwidth, measured in the same run, at head dimension 128 and 4 million rows, for every format and
type.
"""

import argparse
import itertools
import tempfile
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.fit import fit
from rotationzoo.checks.kernel import Validation, validate_kernel
from rotationzoo.codec import cuda, int2
from rotationzoo.codec.throughput import measure
from rotationzoo.model.geometry import Layer, geometry_json
from rotationzoo.recipe import PRESETS
from rotationzoo.writer import write_artifact

DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
GROUPS = (32, 64, 128)
CLIPS = (0.96, 0.92)  # of keys and of values in the recipe `oscar`


def synthetic(folder: Path, dim: int, group: int) -> Artifact:
    """An artifact of random rotations for one layer of two KV heads."""
    geometry = [Layer(0, 0, 4, 2, dim, dim)]
    recipe = PRESETS["random"].model_copy(update={"group_size": group})
    manifest = {
        "model": {
            "id": "synthetic",
            "revision": None,
            "architecture": "",
            "config_sha256": "0" * 64,
            "weights_fingerprint": None,
        },
        "geometry": geometry_json(geometry),
        "recipe": recipe.published(),
        "recipe_sha256": recipe.hash,
        "calibration": None,
        "identity": {},
        "versions": {"rotationzoo": "0"},
        "run": {"seconds": 0.0, "peak_memory_bytes": None},
        "metrics": {"orthogonality_error": 0.0},
    }
    return write_artifact(folder, fit(None, recipe, geometry), None, manifest)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--speed-only", action="store_true")
    args = parser.parse_args()
    total = 0
    if not args.speed_only:
        for dim in map(int, args.dims.split(",")):
            groups = {group for group in GROUPS if dim % group == 0}
            total += sum(check(dim, group, args.rows) for group in sorted({dim, *groups}))
    print(f"{total:,} elements: codes, scales, offsets and dequantized values equal bit by bit")
    for dtype, name, clip in itertools.product(cuda.TYPES, int2.FORMATS, CLIPS):
        speed = measure(128, clip=clip, format=int2.FORMATS[name], dtype=dtype)
        copy = speed["copy_bytes_per_second"]
        rates = ", ".join(f"{what} {rate / copy:.3f}" for what, rate in speed["throughput"].items())
        type_name = str(dtype).removeprefix("torch.")
        print(f"{name} {type_name} clip {clip}: copy {copy / 1e12:.2f} TB/s; {rates}", flush=True)


def check(dim: int, group: int, rows: int) -> int:
    """Validate one shape, and return how many elements were compared. Raises `RotationZooError`
    where any differs."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = synthetic(Path(folder) / "artifact", dim, group)
        report = validate_kernel(artifact, Validation(rows=rows, speed=False))
    print(
        f"D {dim:3d}, group {group:3d}: {report['elements']:,} elements equal, "
        f"rotation error {report['rotation_error']:.3f} of the bound",
        flush=True,
    )
    return report["elements"]


if __name__ == "__main__":
    main()
