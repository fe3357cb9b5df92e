"""Import a published pair of rotations, and compare everything that can be recomputed with the
files.

    python scripts/check_import.py FOLDER

FOLDER holds a pair of version 1 as OSCAR's authors publish it. Prints JSON: the contrast of RoPE
pairs in the recovered statistics (.01 to .54 for the keys of published pairs, about 1 for values);
how far rotations composed again from these statistics are from the files, with the eigenvectors'
signs of the files; and whether an export to version 1 has the same tensors, keys and types.
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
                recomposed_error(moment, matrix, recipe.composition)
                for moment, matrix in zip(moments, matrices, strict=True)
            ]
            contrast = pair_contrast(torch.cat(moments))
            report[side] = {
                "layers": len(layers),
                "rope_contrast": contrast,
                "recomposed_max_difference": max(errors),
            }
        done = export(artifact, Request("sglang", Path(work) / "again"))
        exported = [done.path / name for name in sorted(done.files)]
        originals = {side.path.name: side.path for side in gather_pair([folder])}
        # Whatever the files are called, the one of the keys is the first of their names.
        pairs = zip(exported, [originals[name] for name in sorted(originals)], strict=True)
        report["exported_equal"] = all(same(load(path), load(original)) for path, original in pairs)
    print(json.dumps(report, indent=2))
    close = all(report[side]["recomposed_max_difference"] <= CLOSE for side in ("key", "value"))
    return 0 if close and report["exported_equal"] and not report["problems"] else 1


def recomposed_error(moment: torch.Tensor, matrix: torch.Tensor, composition: str) -> float:
    """Largest difference between a file's rotation and the one composed from its recovered
    statistic."""
    dim = matrix.shape[-1]
    original = compositions.recover_basis(matrix, composition, dim)
    _, basis = compositions.eigenbasis(moment)
    # An eigenvector may as well point the other way, as far as the statistic knows.
    aligned = basis * (basis * original).sum(-2, keepdim=True).sign()
    return (compositions.compose(aligned, composition, dim) - matrix).abs().max().item()


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def same(exported: object, original: object) -> bool:
    """Equal, with the same types and the same order of keys."""
    if type(exported) is not type(original):
        return False
    if isinstance(exported, dict) and isinstance(original, dict):
        if [(type(key), key) for key in exported] != [(type(key), key) for key in original]:
            return False
        return all(same(exported[key], original[key]) for key in exported)
    if isinstance(exported, torch.Tensor) and isinstance(original, torch.Tensor):
        return torch.equal(exported, original)
    return exported == original


if __name__ == "__main__":
    sys.exit(main())
