"""Random equalizers for models of any size, and artifacts that hold them: no text is read."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.equalizing import add_projections, equalize
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.linalg.moments import Statistics
from rotationzoo.model import loading
from rotationzoo.model.geometry import Geometry, cached_layers, geometry_json, geometry_on_meta
from rotationzoo.model.key_classes import key_classes
from rotationzoo.model.key_scales import with_equalizing
from rotationzoo.model.source import find
from rotationzoo.recipe import PRESETS, Recipe, digest
from rotationzoo.rotations import SIDES
from rotationzoo.storage.files import sha256

CONDITION = 30.0


def traced_geometry(config: PretrainedConfig) -> Geometry:
    """The geometry of a model, with what equalizers need to know."""
    model = loading.on_meta(config, "this")
    return with_equalizing(model, geometry_on_meta(model))


def random_equalizers(geometry: Geometry, seed: int = 1) -> dict[tuple[int, str], torch.Tensor]:
    """(Layer, side) -> equalizer.

    Those of keys are powers of two from 1/8 to 8, the same for channels of the same class. Those of
    values have condition numbers from 1 to 30, or are identities where no weights can carry them.
    """
    generator = torch.Generator().manual_seed(seed)
    equalizers = {}
    for layer in cached_layers(geometry):
        of_layer = key_classes(layer)
        factors = 2.0 ** torch.randint(-3, 4, (int(of_layer.max()) + 1,), generator=generator)
        equalizers[layer.index, "key"] = factors[of_layer]
        heads, dim = layer.kv_heads, layer.value_dim
        both = torch.randn(2, heads, dim, dim, generator=generator, dtype=torch.float64)
        left, right = torch.linalg.qr(both)[0]
        condition = CONDITION ** torch.rand(heads, 1, 1, generator=generator, dtype=torch.float64)
        scales = condition ** torch.linspace(-0.5, 0.5, dim, dtype=torch.float64)
        matrix = (
            torch.eye(dim).expand(heads, -1, -1) if layer.fixed_values else left * scales @ right
        )
        equalizers[layer.index, "value"] = matrix.float()
    return equalizers


def statistics_of(model, geometry: Geometry, batches, recipe: Recipe) -> Statistics:
    """Those that a job would collect of a model in memory."""
    statistics = collect(model, geometry, batches, recipe)
    add_projections(statistics, model, geometry)
    return statistics


def calibrated_equalizers(model, geometry: Geometry) -> dict[tuple[int, str], torch.Tensor]:
    """(Layer, side) -> the equalizer that calibration makes of a model in memory, on random
    tokens."""
    ids = torch.randint(3, 59, (8, 64), generator=torch.Generator().manual_seed(0))
    recipe = Recipe(equalize=True, sink=4)
    made = equalize(statistics_of(model, geometry, [ids], recipe), recipe, geometry)
    return {(layer, side): of_layer[side] for layer, of_layer in made.items() for side in SIDES}


def equalized(folder: Path) -> Artifact:
    """An artifact for a saved model, with random rotations and equalizers."""
    recipe = PRESETS["random"]
    output = folder.with_name(f"{folder.name}-equalized")
    made = calibrate(Job(str(folder), recipe, output, device="cpu"))
    geometry = traced_geometry(loading.load_config(find(str(folder))))
    tensors = made.rotation_tensors()
    for (layer, side), equalizer in random_equalizers(geometry).items():
        tensors[f"layers.{layer}.{side}.equalizer"] = equalizer
    path = made.folder / ROTATIONS
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    content = json.loads((made.folder / MANIFEST).read_text())
    content["recipe"] |= {"equalize": True}
    content["recipe_sha256"] = digest(content["recipe"])
    content["files"][ROTATIONS] = {"size": path.stat().st_size, "sha256": sha256(path)}
    content["geometry"] = geometry_json(geometry)
    (made.folder / MANIFEST).write_text(json.dumps(content))
    return Artifact.open(made.folder)
