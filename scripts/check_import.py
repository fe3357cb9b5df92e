"""Import a published pair of rotations and hold everything that can be recomputed against the
files.

    python scripts/check_import.py FOLDER

FOLDER holds a pair of version 1 as OSCAR's makers publish it. Prints JSON: the contrast of RoPE
pairs in the recovered statistics (.01 to .54 for the keys of published pairs, about 1 for values),
how far rotations composed anew from them are from the files (eigenvectors' signs taken from the
files), and whether an export to version 1 has the same tensors, keys and types.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from rotationzoo.checks.verify import verify
from rotationzoo.engines.export import export
from rotationzoo.engines.gather import gather_pair
from rotationzoo.engines.import_ import Import, import_
from rotationzoo.engines.payload import Request
from rotationzoo.engines.rope_signature import pair_contrast
from rotationzoo.linalg import compositions

CLOSE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as work:
        artifact = import_(Import([folder], Path(work) / "imported"))
        recipe = artifact.recipe
        rotations, statistics = artifact.rotations, artifact.statistics or {}
        report = {
            "recipe": recipe.name,
            "notes": artifact.content["imported"]["notes"],
            "problems": verify(artifact).problems,
        }
        for side, kind in (("key", recipe.key_statistic), ("value", recipe.value_statistic)):
            layers = list(rotations)
            moments = [statistics[layer][kind].second_moment for layer in layers]
            matrices = [rotations[layer][side].matrix for layer in layers]
            errors = [
                recomposed_error(m, r, recipe.composition)
                for m, r in zip(moments, matrices, strict=True)
            ]
            contrast = pair_contrast(torch.cat(moments))
            report[side] = {
                "layers": len(layers),
                "rope_contrast": contrast,
                "recomposed_max_difference": max(errors),
            }
        done = export(artifact, Request("sglang", Path(work) / "again"))
        originals = {side.path.name: side.path for side in gather_pair([folder])}
        report["exported_equal"] = all(  # keys, then values, whatever the files are called
            same(load(done.path / name), load(originals[original]))
            for name, original in zip(sorted(done.files), sorted(originals), strict=True)
        )
    print(json.dumps(report, indent=2))
    close = all(report[side]["recomposed_max_difference"] <= CLOSE for side in ("key", "value"))
    return 0 if close and report["exported_equal"] and not report["problems"] else 1


def recomposed_error(moment: torch.Tensor, matrix: torch.Tensor, composition: str) -> float:
    """Largest difference between a file's rotation and the one composed from its recovered
    statistic."""
    dim = matrix.shape[-1]
    given = compositions.recover_basis(matrix, composition, dim)
    _, basis = compositions.eigenbasis(moment)
    aligned = basis * (basis * given).sum(-2, keepdim=True).sign()
    return (compositions.compose(aligned, composition, dim) - matrix).abs().max().item()


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def same(one: object, other: object) -> bool:
    """Equal, with the same types and the same order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return [(type(k), k) for k in one] == [(type(k), k) for k in other] and all(
            same(one[k], other[k]) for k in one
        )
    return (
        torch.equal(one, other)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        else one == other
    )


if __name__ == "__main__":
    sys.exit(main())
