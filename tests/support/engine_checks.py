"""An export read as its engine reads it, and held against the artifact."""

import numpy as np
import torch

from rotationzoo.artifact.store import Artifact
from rotationzoo.codec import int2
from rotationzoo.recipe import Recipe
from support import engine_readers as engines
from support.engine_artifacts import (
    AGREED,
    attend,
    layers_of,
    matrices,
    rows_of,
)


def check_engine(engine: str, artifact: Artifact, done, transpose: bool = False) -> None:
    """Attention through the export is exact, and rows are stored as the codec says."""
    pooled = bool(AGREED[engine].get("pooled"))
    recipe = artifact.recipe
    for layer in layers_of(artifact):
        rotate = engines.READ[engine](done.path, done.launch.environment, layer.kv_heads)
        k, v, q = (
            rows_of(layer, "key").numpy(),
            rows_of(layer, "value").numpy(),
            rows_of(layer, "key").numpy()[:, ::-1],
        )
        rotated_q = rotate("key", layer.index, q)
        back = rotate(
            "value", layer.index, np.stack([np.eye(layer.value_dim, dtype=np.float32)] * len(v))
        ).swapaxes(-1, -2)
        through = (
            attend(rotated_q, rotate("key", layer.index, k), rotate("value", layer.index, v)) @ back
        )
        if not recipe.center_keys:
            assert np.abs(through - attend(q, k, v)).max() < 1e-4  # measured 1e-5
        for side, rows in (("key", k), ("value", v)):
            clip = done_clip(engine, recipe, side)
            group = recipe.group(rows.shape[-1])
            matrix = matrices(artifact, layer, side, pooled)
            expected_rows = torch.from_numpy(rows)
            if recipe.center_keys and side == "key":
                expected_rows = (
                    expected_rows
                    - artifact.rotation_tensors()[f"layers.{layer.index}.key.mean"][:, None]
                )
            wanted = expected_rows @ (matrix.mT if transpose else matrix)
            codes, packed = engines.STORE[engine](rotate(side, layer.index, rows), clip, group)
            if engine == "llama.cpp":
                reference = engines.store_q2_0(wanted.numpy(), clip, group)
                assert_codes(codes, reference[0])
                continue
            form = int2.FORMATS.get(engine, int2.SGLANG)
            stored = int2.quantize(wanted, clip, group, form).codes
            assert_codes(codes, stored.numpy())
            same = (codes == stored.numpy()).all(-1)
            assert (packed == int2.pack(stored, form.packing).numpy())[same].all()


def assert_codes(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal; a product of two libraries may differ in the last bit, which moves at most one code in
    a thousand."""
    different = (found != expected).mean()
    assert different < 1e-3, f"{different:.1%} of the codes differ"


def done_clip(engine: str, recipe: Recipe, side: str) -> float:
    agreed = AGREED[engine].get("clip")
    return agreed[0] if agreed else recipe.key_clip if side == "key" else recipe.value_clip
