"""Random equalizers for models of any size, and artifacts that hold them: no text is read."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.model import loading
from rotationzoo.model.foldable import find_key_scales
from rotationzoo.model.geometry import Geometry, cached_layers, geometry_on_meta
from rotationzoo.model.source import find
from rotationzoo.recipe import PRESETS, digest
from rotationzoo.storage.files import sha256

CONDITION = 30.0


def random_equalizers(
    geometry: Geometry, classes: Mapping[int, torch.Tensor], seed: int = 1
) -> dict[tuple[int, str], torch.Tensor]:
    """(Layer, side) -> equalizer.

    Those of keys are powers of two from 1/8 to 8, the same for channels of the same class
    (`KeyScales.classes`). Those of values have condition numbers from 1 to 30.
    """
    generator = torch.Generator().manual_seed(seed)
    equalizers = {}
    for layer in cached_layers(geometry):
        of_layer = classes[layer.index]
        factors = 2.0 ** torch.randint(-3, 4, (int(of_layer.max()) + 1,), generator=generator)
        equalizers[layer.index, "key"] = factors[of_layer]
        heads, dim = layer.kv_heads, layer.value_dim
        both = torch.randn(2, heads, dim, dim, generator=generator, dtype=torch.float64)
        left, right = torch.linalg.qr(both)[0]
        condition = CONDITION ** torch.rand(heads, 1, 1, generator=generator, dtype=torch.float64)
        scales = condition ** torch.linspace(-0.5, 0.5, dim, dtype=torch.float64)
        equalizers[layer.index, "value"] = (left * scales @ right).float()
    return equalizers


def equalized(folder: Path, shared_norm: bool) -> Artifact:
    """An artifact for a saved model with heads of 16 channels, with random rotations and
    equalizers. `shared_norm`: whether the heads share the weight of a norm."""
    recipe = PRESETS["random"]
    output = folder.with_name(f"{folder.name}-equalized")
    made = calibrate(Job(str(folder), recipe, output, device="cpu"))
    source = find(str(folder))
    model = loading.on_meta(loading.load_config(source), source.name)
    geometry = geometry_on_meta(model)
    classes = find_key_scales(model, geometry, source.name).classes
    tensors = made.rotation_tensors()
    for (layer, side), equalizer in random_equalizers(geometry, classes).items():
        tensors[f"layers.{layer}.{side}.equalizer"] = equalizer
    path = made.folder / ROTATIONS
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    content = json.loads((made.folder / MANIFEST).read_text())
    content["recipe"] |= {"equalize": True}
    content["recipe_sha256"] = digest(content["recipe"])
    content["files"][ROTATIONS] = {"size": path.stat().st_size, "sha256": sha256(path)}
    for layer in content["geometry"]:
        layer |= {"rope_pairs": 8, "rope_distance": 8, "shared_norm": shared_norm}
    (made.folder / MANIFEST).write_text(json.dumps(content))
    return Artifact.open(made.folder)
