"""The value rotation in a model's own weights, so that its cache holds rotated values at no cost.

Attention is linear in its values: of `v @ R` it makes `o @ R`, which the output projection can
undo. That holds only where nothing else reads either, so the model runs on `meta` and every
operation between the two projections is looked at.
"""

import json
import os
import shutil
import struct
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel

from rotationzoo import __version__
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.engines.export import ABSORBED as RECORD
from rotationzoo.errors import RotationZooError, UnsupportedModel, as_unavailable
from rotationzoo.model import loading
from rotationzoo.model.capture import Attention, decoder, intercept
from rotationzoo.model.files import weight_files
from rotationzoo.model.geometry import Geometry, geometry_on_meta, same_shapes
from rotationzoo.model.source import Source, fetch, find, weights_fingerprint
from rotationzoo.progress import Progress, silent
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.folders import install, temporary_sibling

_INDEX = "model.safetensors.index.json"
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SERVE = "serve the model as it is and rotate its values on the way to the cache, with the artifact"
_Change = tuple[torch.Size, torch.Tensor, bool]
"""Shape of a parameter, `R` `[H, D, D]` of its heads, and whether the heads are its columns and not
its rows."""


def absorb(artifact: Artifact, model: str, output: Path, progress: Progress = silent) -> Path:
    """Write a copy of a model whose cache holds `v @ R` to a new folder, and return that. Memory is
    that of one tensor.

    Raises `RotationZooError` before anything is written: the artifact is damaged or of another
    model, the output is there, the weights are quantized or rotated already, or
    (`UnsupportedModel`) a layer cannot absorb a rotation.
    """
    if output.exists():
        raise RotationZooError(
            f"{output} is there already", hint="choose another place with --output"
        )
    progress("looking at the model", 0, 0)
    made_for, calibrate = artifact.manifest.model, f"make one with: rotationzoo calibrate {model}"
    source = find(model, made_for.revision if made_for.id == model else None)
    fetch(source, weights=False)
    if (source.folder / RECORD).is_file():
        raise RotationZooError(
            f"{model} has absorbed a rotation already, says its {RECORD}",
            hint="give the model before that",
        )
    config = loading.load_config(source)
    if any(
        getattr(part, "quantization_config", None)
        for part in (config, config.get_text_config(decoder=True))
    ):
        blocks = f"the weights of {model} are quantized in blocks, which cannot carry a rotation"
        raise UnsupportedModel(
            blocks, hint="absorb into the weights that it was quantized from, and quantize those"
        )
    if problems := verify(artifact, model, source.revision).problems:
        raise RotationZooError(
            f"{artifact.folder} does not fit {model}: {problems[0]}", hint=calibrate
        )
    changes = _changes(artifact, loading.on_meta(config, model), model)
    progress("fetching the weights", 0, 0)
    fetch(source)
    if made_for.weights_fingerprint not in (
        None,
        weights_fingerprint(source),
    ):  # of a hub's model it is known only now
        raise RotationZooError(
            f"{artifact.folder} was made for other weights than those of {model}", hint=calibrate
        )
    places = _places(source, changes)
    files = [*_others(source.folder), *weight_files(source.folder)]
    record = {
        "rotationzoo": __version__,
        "absorbed": "value rotation",
        "artifact": artifact.identity,
    }
    with disk_errors(output), temporary_sibling(output) as work:
        if output.exists():
            raise RotationZooError(
                f"{output} is there by now", hint="choose another place with --output"
            )
        for done, path in enumerate(files):
            progress("absorbing", done, len(files))
            shutil.copyfile(path, work / path.name)
            for name, (file, begin, dtype) in places.items():
                if file == path:
                    _edit(work / path.name, begin, dtype, *changes[name])
            (work / path.name).chmod(0o644)  # as every file that is handed to an engine
        (work / RECORD).write_text(
            json.dumps({**record, "model": made_for}, indent=2) + "\n", encoding="utf-8"
        )
        install(work, output)
    return output


def _others(folder: Path) -> list[Path]:
    """What is copied beside the weights. Raises `RotationZooError` for a link that leads out of the
    folder, but for the hub's cache, which is made of links: copies are published, and what links
    lead to need not be."""
    blobs = folder.parent.parent / "blobs"
    places = [os.path.realpath(folder), *([] if blobs.is_symlink() else [os.path.realpath(blobs)])]
    others = [
        path for path in folder.iterdir() if path.name == _INDEX or not path.name.endswith(_WEIGHTS)
    ]
    for path in others:
        if not any(Path(os.path.realpath(path)).is_relative_to(place) for place in places):
            raise RotationZooError(
                f"{path} leads out of its folder by a symbolic link",
                hint="remove it, or put the file itself there",
            )
    return [path for path in others if path.is_file()]


def _changes(artifact: Artifact, model: PreTrainedModel, name: str) -> dict[str, _Change]:
    """What to do to which parameter of the model on `meta`."""
    with as_unavailable(f"{name} fails when it runs"):
        geometry = geometry_on_meta(model)
    if geometry is None or not same_shapes(geometry, artifact.geometry):
        raise UnsupportedModel(
            f"what the layers of {name} do cannot be checked without its weights", hint=_SERVE
        )
    changes: dict[str, _Change] = {}
    for layer, (value, output) in zip(geometry, _projections(model, geometry, name), strict=True):
        rotation = (
            artifact.rotations[layer.index].value.matrix.double().expand(layer.kv_heads, -1, -1)
        )
        for part, tensor in model.get_submodule(value).named_parameters():
            changes[f"{value}.{part}"] = tensor.shape, rotation, False
        shape = model.get_parameter(f"{output}.weight").shape
        changes[f"{output}.weight"] = shape, rotation.repeat_interleave(layer.group, 0), True
    return changes


class _Trace(TorchDispatchMode):
    """Who reads each tensor: the module in `inside`, or an operation by name. Its views and
    multiples count as the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: str | None = None
        self.readers: dict[int, set[str]] = defaultdict(set)
        self._multiple_of: dict[int, int] = {}
        self._alive: list[Any] = []  # the address of what is gone would be given away again

    def identity(self, tensor: torch.Tensor) -> int:
        address = tensor.untyped_storage()._cdata
        return self._multiple_of.get(address, address)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        read, made = (
            [x for x in tree_leaves(t) if isinstance(x, torch.Tensor)]
            for t in ((args, kwargs), result)
        )
        self._alive += made
        if function is torch.ops.aten.mul.Tensor and not isinstance(args[1], torch.Tensor):
            self._multiple_of[made[0].untyped_storage()._cdata] = self.identity(args[0])
        same = set() if function._schema.is_mutable else set(map(self.identity, made))
        for identity in set(map(self.identity, read)) - same:
            self.readers[identity].add(self.inside or str(function))
        return result


@torch.no_grad()
def _projections(model: PreTrainedModel, geometry: Geometry, name: str) -> list[tuple[str, str]]:
    """The modules of each layer's value and output projection, if only attention is between them,
    or `UnsupportedModel`."""
    trace, calls, makers = _Trace(), {}, {}
    names = {id(module): path for path, module in model.named_modules()}

    def attention(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention
    ) -> torch.Tensor:
        trace.inside = f"the attention of layer {layer}"
        output = attend(query, key, value).contiguous()
        trace.inside, calls[layer] = None, (query, key, value, output)
        return output

    def linear(module: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
        trace.inside = names[id(module)]
        output = torch.nn.functional.linear(states, module.weight, module.bias)
        trace.inside, makers[trace.identity(output)] = None, names[id(module)]
        return output

    # A cache copies what it stores; handed back as it is, it can be told by its address.
    uncopied = patch.object(Cache, "update", lambda self, key, value, *args, **kwargs: (key, value))
    named = patch.object(torch.nn.Linear, "forward", linear)
    with (
        as_unavailable(f"{name} fails when it runs"),
        uncopied,
        named,
        intercept(model, attention),
        trace,
    ):
        decoder(model)(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"), use_cache=True)
    owners = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    found: list[tuple[str, str]] = []
    for layer in geometry:
        query, key, value, output = calls[layer.index]
        maker, readers = (
            makers.get(trace.identity(value)),
            sorted(trace.readers[trace.identity(output)]),
        )
        others = sorted(
            trace.readers[trace.identity(value)] - {f"the attention of layer {layer.index}", maker}
        )
        width, inner = layer.kv_heads * layer.value_dim, layer.query_heads * layer.value_dim
        weights = [
            model.get_parameter(f"{path}.weight")
            for path in (maker, *readers)
            if path in names.values()
        ]
        if layer.owner != layer.index:
            problem = f"no value projection of its own: it reads the cache of layer {layer.owner}"
        elif maker is None:
            problem = "a norm or another operation between the value projection and attention, or no value projection"
        elif len(weights[0]) != width or trace.identity(value) in map(trace.identity, (query, key)):
            problem = f"a fused value projection, {maker}"
        elif others or value.stride()[1:] != (layer.value_dim, width, 1):
            problem = f"another use of its values than its attention, in {', '.join(others) or 'their order'}"
        elif len(readers) != 1 or len(weights) != 2 or weights[1].shape[1] != inner:
            problem = f"a gate or a norm between attention and the output projection, {', '.join(readers)}"
        elif any(owners[id(weight)] > 1 for weight in weights) or maker in dict(found):
            problem = "a value or output projection that it shares with another module"
        else:
            found.append((maker, readers[0]))
            continue
        raise UnsupportedModel(f"layer {layer.index} of {name} has {problem}", hint=_SERVE)
    return found


def _places(
    source: Source, changes: dict[str, _Change]
) -> dict[str, tuple[Path, int, torch.dtype]]:
    """The file, offset and type of each parameter. Raises `RotationZooError` where there is not one
    tensor of its shape."""
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in weight_files(source.folder):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            tensors |= {
                name: (path, 8 + length, entry)
                for name, entry in json.loads(file.read(length)).items()
            }
    places = {}
    for parameter, (shape, _, _) in changes.items():
        # Vision models may have another prefix in the checkpoint, often the same words in another
        # order.
        end = "." + parameter[max(parameter.rfind("layers."), 0) :]
        names = [name for name in tensors if name == parameter] or [
            name for name in tensors if f".{name}".endswith(end)
        ]
        names = [
            name for name in names if sorted(name.split(".")) == sorted(parameter.split("."))
        ] or names
        path, start, entry = tensors[names[0]] if len(names) == 1 else (Path(), 0, {})
        if entry.get("shape") != list(shape) or entry["dtype"] not in _DTYPES:
            missing = f"the weights of {source.name} have no {parameter} of shape {list(shape)} in floating point"
            raise RotationZooError(
                missing,
                hint="write them again with transformers' save_pretrained, and give that folder",
            )
        places[parameter] = path, start + entry["data_offsets"][0], _DTYPES[entry["dtype"]]
    return places


def _edit(
    path: Path,
    begin: int,
    dtype: torch.dtype,
    shape: torch.Size,
    rotation: torch.Tensor,
    columns: bool,
) -> None:
    """Change one tensor of a file in place: per head `R^T` times its rows, or its columns times
    `R`; in float64."""
    with path.open("r+b") as file:
        file.seek(begin)
        tensor = (
            torch.frombuffer(bytearray(file.read(shape.numel() * dtype.itemsize)), dtype=dtype)
            .view(shape)
            .double()
        )
        heads = (tensor.mT if columns else tensor).unflatten(0, rotation.shape[:2])
        rows = torch.einsum("hij,hi...->hj...", rotation, heads).flatten(0, 1)
        file.seek(begin)
        file.write(
            (rows.mT if columns else rows).to(dtype).contiguous().view(torch.uint8).numpy().data
        )
