"""Artifacts of tiny models with statistics, and their export for every engine."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.reductions import Request, pooled_rotations
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.sensitivity import add_attention
from rotationzoo.codec import int2
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.engines.export import export
from rotationzoo.geometry import Layer, cached_layers
from rotationzoo.linalg.moments import average
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Recipe
from rotationzoo.writer import write_artifact
from support import architectures
from support import engine_readers as engines
from support.reports import make_manifest
from support.tensors import stored_rotations

IDS = torch.randint(3, 59, (4, 48), generator=torch.Generator().manual_seed(1))
OSCAR = Recipe(sink=8, recent=16)
CENTERED = OSCAR.model_copy(update={"center_keys": True})
# The engines for which files of keys and values are written; `test_latents` has the other one.
READERS = {name: entry for name, entry in ENGINES.items() if entry.module and entry.rotates}
WRITTEN = tuple(name for name, entry in READERS.items() if "key" in entry.takes)


def make(folder: Path, family: str, recipe: Recipe = OSCAR, **changes) -> Artifact:
    """An artifact of a tiny random model, with statistics."""
    model = architectures.build(family, **changes)
    geometry = geometry_of(model)
    statistics = collect(model, geometry, [IDS], recipe.model_copy(update={"sink": 8}))
    if recipe.transform:
        add_attention(statistics)
    rotations = spend_bits(fit(statistics, recipe, geometry), recipe.budget)
    manifest = make_manifest(f"tiny/{family}", family, geometry, recipe)
    manifest["model"]["revision"] = "0" * 40
    model.config.save_pretrained(folder.with_name("config"))
    manifest["model"]["config_sha256"] = hash_config(folder.with_name("config"))
    return write_artifact(folder, rotations, average(statistics), manifest)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Artifacts by family and recipe, each made once, which no test may change."""
    known: dict[tuple, Artifact] = {}

    def get(family: str = "qwen3", recipe: Recipe = OSCAR, **changes) -> Artifact:
        key = family, recipe.hash, json.dumps(changes, sort_keys=True)
        if key not in known:
            known[key] = make(tmp_path_factory.mktemp("made") / family, family, recipe, **changes)
        return known[key]

    return get


def layers_of(artifact: Artifact) -> list[Layer]:
    return cached_layers(artifact.geometry)


def model_of(artifact: Artifact) -> str:
    """The folder with the config of the model that it was made for."""
    return str(artifact.folder.with_name("config"))


def base_for(artifact: Artifact, folder: Path, architecture: str = "qwen3") -> Path:
    layers = artifact.geometry
    last, one = max(layer.index for layer in layers), layers[0]
    shape = dict(
        layers=last + 1, hidden=64, heads=one.query_heads, kv_heads=one.kv_heads, dim=one.key_dim
    )
    shape["cached"] = {layer.index for layer in layers}
    return engines.write_base(folder / "base.gguf", architecture=architecture, **shape)


def exported(engine: str, artifact: Artifact, folder: Path, **changes):
    if engine == "llama.cpp" and "base" not in changes:
        folder.mkdir(parents=True, exist_ok=True)
        changes["base"] = base_for(artifact, folder)
    return export(artifact, Request(engine, folder / "out", **changes))


def matrices(artifact: Artifact, layer, side: str, pooled: bool) -> torch.Tensor:
    """What the engine should multiply by, `[H, D, D]`."""
    rotations = artifact.rotations
    if pooled:
        rotations = pooled_rotations(artifact)
    return rotations[layer.index][side].matrix.expand(layer.kv_heads, -1, -1)


def rows_of(layer, side: str, tokens: int = 24) -> torch.Tensor:
    dim = layer.key_dim if side == "key" else layer.value_dim
    generator = torch.Generator().manual_seed(layer.index)
    return torch.randn(layer.kv_heads, tokens, dim, generator=generator) * (
        1 + torch.arange(dim) % 5
    )


def attend(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def check_engine(engine: str, artifact: Artifact, done, transpose: bool = False) -> None:
    """Attention through the export is exact, and rows are stored as the codec says."""
    pooled = not ENGINES[engine].heads
    recipe = artifact.recipe
    for layer in layers_of(artifact):
        rotate = engines.READ[engine](done.path, done.launch.environment, layer.kv_heads)
        k, v = (rows_of(layer, side).numpy() for side in ("key", "value"))
        q = k[:, ::-1]
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
                mean = stored_rotations(artifact)[f"layers.{layer.index}.key.mean"]
                expected_rows = expected_rows - mean[:, None]
            wanted = expected_rows @ (matrix.mT if transpose else matrix)
            codes, packed = engines.STORE[engine](rotate(side, layer.index, rows), clip, group)
            if engine == "llama.cpp":
                reference = engines.store_q2_0(wanted.numpy(), clip, group)
                assert_codes(codes, reference[0])
                continue
            form = int2.FORMATS[ENGINES[engine].format]
            stored = int2.quantize(wanted, clip, group, form).codes
            assert_codes(codes, stored.numpy())
            same = (codes == stored.numpy()).all(-1)
            assert (packed == int2.pack(stored, form).numpy())[same].all()


def assert_codes(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal; a product of two libraries may differ in the last bit, which moves at most one code in
    a thousand."""
    different = (found != expected).mean()
    assert different < 1e-3, f"{different:.1%} of the codes differ"


def done_clip(engine: str, recipe: Recipe, side: str) -> float:
    one = ENGINES[engine].clip == "one"
    return recipe.key_clip if side == "key" or one else recipe.value_clip
