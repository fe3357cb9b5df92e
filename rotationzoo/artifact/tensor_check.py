"""Checks the tensors of an artifact's files against the layout that its recipe and geometry
require."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rotationzoo.artifact.layout import Layout, Shapes, split_name
from rotationzoo.codec.int2 import LARGEST
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.orthogonality import is_orthogonal

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
"""The dtypes that artifacts use, by the names that safetensors gives them."""
_SHOWN = 4  # unknown tensors named in a message

Problem = tuple[str, int]
"""What is wrong, and a layer that has it."""


def read_tensors(path: Path, layout: Layout) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a safetensors file, and one sentence for each kind of problem.

    Names, dtypes and shapes are checked first, and no tensor is read if any of them is wrong. What
    is read can therefore be no larger than the layout allows, because safetensors itself checks
    the size of each tensor's data. The file is opened once, so what is checked is what is read.
    Raises `RotationZooError` for no safetensors, and for dtypes that no artifact uses.
    """
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            slices = {name: file.get_slice(name) for name in names}
            shapes: Shapes = {
                name: (DTYPES[part.get_dtype()], tuple(part.get_shape()))
                for name, part in slices.items()
            }
            if problems := shape_problems(shapes, layout):
                return {}, problems
            tensors = {name: file.get_tensor(name) for name in names}
    except KeyError as error:
        raise _damaged(path, f"it has tensors of type {error}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    return tensors, sentences(_value_problems(tensors))


def _damaged(path: Path, reason: str) -> RotationZooError:
    return RotationZooError(f"{path} is damaged: {reason}", hint="fetch or make it again")


def tensor_problems(tensors: Mapping[str, torch.Tensor], layout: Layout) -> list[str]:
    """One sentence for each kind of problem with tensors that have not been written yet."""
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    # The value checks assume that the names and shapes are right.
    return shape_problems(shapes, layout) or sentences(_value_problems(tensors))


def shape_problems(shapes: Shapes, layout: Layout) -> list[str]:
    """One sentence for each kind of tensors missing, superfluous, or of wrong shape or dtype."""
    problems = sentences(_misfits(shapes, layout))
    if extra := sorted(shapes.keys() - layout.shapes.keys()):
        names = ", ".join(name[:80] for name in extra[:_SHOWN])
        problems.append(f"tensors that belong to no layer: {names}")
    return problems


def _misfits(shapes: Shapes, layout: Layout) -> Iterator[Problem]:
    for name, shape in layout.shapes.items():
        layer, kind, field = split_name(name)
        words = _words(kind, field)
        if name in shapes:
            if shapes[name] != shape:
                yield f"{words} of another shape or type than the model's", layer
        elif layout.optional is None or not name.endswith(layout.optional):
            yield f"{words} missing", layer


def _value_problems(tensors: Mapping[str, torch.Tensor]) -> Iterator[Problem]:
    """Tensors that are not finite, means too large for the codec, and counts that are not positive.
    The tensors must have the names of a layout."""
    for name, tensor in tensors.items():
        layer, kind, field = split_name(name)
        words = _words(kind, field)
        if not torch.isfinite(tensor).all():
            yield f"{words} not finite", layer
        elif field == "mean" and tensor.abs().max() > LARGEST:
            yield f"{words} beyond {LARGEST:.0e}, the most that the codec takes", layer
        elif field == "count" and tensor.item() <= 0:
            yield f"{words} not positive", layer


def orthogonality_problems(
    tensors: Mapping[str, torch.Tensor], imported: bool
) -> Iterator[Problem]:
    """Rotations that are not orthogonal. The tensors must have the names of a layout."""
    for name, tensor in tensors.items():
        layer, kind, field = split_name(name)
        # Factors of error feedback are not orthogonal; what they must be depends on the statistics.
        if field == "rotation" and not is_orthogonal(tensor, imported):
            yield f"{_words(kind, field)} not orthogonal", layer


def sentences(problems: Iterable[Problem]) -> list[str]:
    """Turn `("what", 0), ("what", 1)` into `["what: layers 0, 1"]`."""
    layers: dict[str, list[int]] = {}
    for what, layer in problems:
        layers.setdefault(what, []).append(layer)
    lines = []
    for what, indices in layers.items():
        noun = "layers" if len(indices) > 1 else "layer"
        lines.append(f"{what}: {noun} {', '.join(map(str, sorted(indices)))}")
    return lines


def _words(kind: str, field: str) -> str:
    """Turn `key` and `second_moment` into "key second moment"."""
    return f"{kind} {field.replace('_', ' ')}"
