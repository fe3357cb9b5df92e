"""Tensors of an artifact's files, held against the layout that recipe and geometry ask for."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rotationzoo.artifact.layout import Layout, Shapes, split_name
from rotationzoo.codec.int2 import LARGEST
from rotationzoo.errors import RotationZooError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_SHOWN = 4  # names of tensors that belong to no layer, in a sentence
_Layers = dict[str, list[int]]  # what is wrong -> the layers where it is


def read_tensors(path: Path, layout: Layout) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a safetensors file, opened once, and a sentence for each kind of problem.

    Names, types and shapes are checked first, and no tensor is read where they are wrong: what is
    read is as large as the layout says, because safetensors itself checks that shape times type is
    the size of a tensor's data and lies within the file. Raises `RotationZooError` for what is no
    such file, and for types that no artifact has.
    """
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            shapes: Shapes = {
                name: (_DTYPES[part.get_dtype()], tuple(part.get_shape()))
                for name, part in slices.items()
            }
            if problems := shape_problems(shapes, layout):
                return {}, problems
            tensors = {name: file.get_tensor(name) for name in names}
    except KeyError as error:
        raise _damaged(path, f"it has tensors of type {error}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    return tensors, value_problems(tensors)


def _damaged(path: Path, reason: str) -> RotationZooError:
    return RotationZooError(f"{path} is damaged: {reason}", hint="fetch or make it again")


def tensor_problems(tensors: Mapping[str, torch.Tensor], layout: Layout) -> list[str]:
    """A sentence for each kind of problem with tensors that are not in a file yet."""
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return shape_problems(shapes, layout) or value_problems(tensors)


def shape_problems(shapes: Shapes, layout: Layout) -> list[str]:
    """Missing, misshapen and superfluous tensors, one sentence for each kind of problem."""
    layers: _Layers = defaultdict(list)
    for name, shape in layout.shapes.items():
        layer, kind, field = split_name(name)
        words = _words(kind, field)
        if name in shapes:
            if shapes[name] != shape:
                layers[f"{words} of another shape or type than the model's"].append(layer)
        elif layout.optional is None or not name.endswith(layout.optional):
            layers[f"{words} missing"].append(layer)
    problems = sentences(layers)
    if extra := sorted(shapes.keys() - layout.shapes.keys()):
        names = ", ".join(name[:80] for name in extra[:_SHOWN])
        problems.append(f"tensors that belong to no layer: {names}")
    return problems


def value_problems(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors that are not finite, means that the codec does not take, and counts that are not
    positive; their names are those of a layout."""
    layers: _Layers = defaultdict(list)
    for name, tensor in tensors.items():
        layer, kind, field = split_name(name)
        words = _words(kind, field)
        if not torch.isfinite(tensor).all():
            layers[f"{words} not finite"].append(layer)
        elif field == "mean" and tensor.abs().max() > LARGEST:
            beyond = f"{words} beyond {LARGEST:.0e}, the most that the codec takes"
            layers[beyond].append(layer)
        elif field == "count" and tensor.item() <= 0:
            layers[f"{words} not positive"].append(layer)
    return sentences(layers)


def sentences(layers: Mapping[str, list[int]]) -> list[str]:
    """`{"what": [0, 1]}` as `["what: layers 0, 1"]`."""
    lines = []
    for what, indices in layers.items():
        noun = "layers" if len(indices) > 1 else "layer"
        lines.append(f"{what}: {noun} {', '.join(map(str, sorted(indices)))}")
    return lines


def _words(kind: str, field: str) -> str:
    """`key` and `second_moment` as "key second moment"."""
    return f"{kind} {field.replace('_', ' ')}"
