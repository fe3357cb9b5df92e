"""Equalised artifacts with random equalizers, for models of any size: no text is read."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model import loading
from rotationzoo.model.foldable import find_key_scales
from rotationzoo.model.geometry import cached_layers, geometry_on_meta
from rotationzoo.model.source import find
from rotationzoo.recipe import PRESETS, digest
from rotationzoo.storage.files import sha256

CONDITION = 30.0


def key_factors(classes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Powers of two from 1/8 to 8, `[KV heads, D]`, the same for channels of the same class."""
    of_class = 2.0 ** torch.randint(-3, 4, (int(classes.max()) + 1,), generator=generator)
    return of_class[classes]


def value_matrices(heads: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Matrices `[heads, dim, dim]` with a condition number of 30."""
    both = torch.randn(2, heads, dim, dim, generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(both)[0]
    scales = torch.logspace(-0.5, 0.5, dim, CONDITION, dtype=torch.float64)
    return (left * scales @ right).float()


def equalized(folder: Path, name: str = "equalized", **changes) -> Artifact:
    """An artifact with random rotations, means and equalizers for a saved model.

    A side that the model's weights cannot carry gets an equalizer all the same.
    """
    recipe = PRESETS["random"].model_copy(update=changes)
    made = calibrate(
        Job(str(folder), recipe, folder.with_name(f"{folder.name}-{name}"), device="cpu")
    )
    source = find(str(folder))
    model = loading.on_meta(loading.load_config(source), source.name)
    geometry = geometry_on_meta(model)
    generator = torch.Generator().manual_seed(0)
    try:
        classes = find_key_scales(model, geometry, source.name).classes
    except UnsupportedModel:
        classes = {
            layer.index: torch.arange(layer.key_dim // 2).repeat(layer.kv_heads, 2)
            for layer in cached_layers(geometry)
        }
    tensors = made.rotation_tensors()
    for layer in cached_layers(geometry):
        factors = key_factors(classes[layer.index], generator)
        matrices = value_matrices(layer.kv_heads, layer.value_dim, generator)
        tensors[f"layers.{layer.index}.key.equalizer"] = factors
        tensors[f"layers.{layer.index}.value.equalizer"] = matrices
    return rewritten(made, tensors, equalize=True)


def rewritten(artifact: Artifact, tensors: dict[str, torch.Tensor], **changes) -> Artifact:
    """The same artifact with other tensors and changes of its recipe, opened again."""
    path = artifact.folder / ROTATIONS
    save_file(tensors, path)
    content = json.loads((artifact.folder / MANIFEST).read_text())
    content["recipe"] |= changes
    content["recipe_sha256"] = digest(content["recipe"])
    content["files"][ROTATIONS] = {"size": path.stat().st_size, "sha256": sha256(path)}
    (artifact.folder / MANIFEST).write_text(json.dumps(content))
    return Artifact.open(artifact.folder)
