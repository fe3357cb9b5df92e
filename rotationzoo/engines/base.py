"""Files that serving engines read: one module an engine, with what it takes, how its files are
written and how it is launched.

Everywhere outside these modules a matrix is meant as in `x @ R`; the modules know which engine
wants it transposed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import Geometry, cached_layers

_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LONGEST_TEXT = 1000

MOST_LAYERS = 1024
"""No model has nearly as many; a file that says so wants memory."""

SIDES: tuple[Literal["key", "value"], ...] = ("key", "value")


WORDS = {"qqt": "query", "ktk": "key", "sst": "key_energy", "vtv": "value"}
"""OSCAR's words for statistics -> ours. Its `sst` is also what the exact `output` is called: the
words know no difference."""


@dataclass(frozen=True)
class Side:
    """Keys or values of every layer."""

    rotation: Mapping[int, torch.Tensor]
    """Layer, counted over all layers of the model -> float32 `[D, D]`, shared by its KV heads, or
    `[H, D, D]`."""
    objective: str
    """Statistic and composition in the words of OSCAR's files, as `qqt_r_h_pbr`, or a data-free
    name, as `identity`."""
    eigenvalues: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """`[D]` or `[H, D]`; empty where a file has none."""
    mean: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """What is subtracted before the rotation, `[H, D]` or `[D]`; empty where nothing is."""

    @property
    def per_head(self) -> bool:
        return any(matrix.ndim == 3 for matrix in self.rotation.values())


@dataclass(frozen=True)
class RotationFile:
    """One side as a file had it."""

    path: Path
    format: str
    """`V1`, `V2`, `V3`, `tensors`, `MLX` or `GGUF`."""
    side: Literal["key", "value"] | None
    """None where neither the file nor its name says it."""
    content: Side
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """What the file says of how it was made."""
    notes: tuple[str, ...] = ()
    descending: bool = False
    """Whether the file has its largest eigenvalue first."""


@dataclass(frozen=True)
class Payload:
    """What an engine is handed: an artifact, reduced to what the engine takes and the user agreed
    to."""

    model: str | None
    """None where nobody has said which model it is for, and the numbers of heads are not known."""
    geometry: Geometry
    key: Side
    value: Side | None
    """None: the weights carry the value rotation already."""
    clips: Mapping[int, tuple[float, float]]
    """Layer -> clip ratio of keys and of values; 1 is off."""
    group_size: int | None
    sink: int
    recent: int
    provenance: Mapping[str, Any]

    @property
    def clip(self) -> tuple[float, float]:
        """The clip ratios that all layers share."""
        (shared,) = set(self.clips.values())
        return shared

    @property
    def group(self) -> int:
        """Channels that share a scale in the layer with the most of them."""
        return self.group_size or max(layer.key_dim for layer in cached_layers(self.geometry))


@dataclass(frozen=True)
class Capabilities:
    """What an engine can honour. What it cannot is refused, or reduced when the user asks."""

    heads: bool
    """A matrix for each KV head."""
    mean: bool
    """A key mean."""
    clip: Literal["one", "side", "layer"]
    """One clip ratio, one for keys and one for values, or two for each layer."""
    windows: bool
    """Numbers of exact tokens that are not its own."""


@dataclass(frozen=True)
class Launch:
    """How the engine is started with the files; `command` may have more than one line."""

    command: list[str]
    environment: dict[str, str]
    notes: list[str]


@dataclass(frozen=True)
class Options:
    """What only some engines need."""

    base: Path | None = None
    """The GGUF file that a copy is made of."""
    engine_hadamard: bool = False
    """Leave the last Hadamard transform to the engine, which applies its own."""
    model: str | None = None
    """The model that the base was converted from, to compare it with; else the artifact's own,
    where it is in the cache."""


def mapping(content: Any) -> Mapping[str, Any]:
    """What a file has where a table is expected, or an empty one: foreign files hold all sorts of
    things."""
    return content if isinstance(content, Mapping) else {}


def primitives(content: Any) -> dict[str, str | int | float]:
    """Of a table that a file has, what a manifest can hold: printable text, finite numbers and
    truth values."""
    return {
        name: value
        for name, value in mapping(content).items()
        if _is_text(name) and _is_primitive(value)
    }


def _is_primitive(value: Any) -> bool:
    if isinstance(value, int | float):
        return abs(value) < 2**63 and math.isfinite(value)
    return _is_text(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT and value.isprintable()


def named(content: Any) -> str:
    """The objective that a file names, or `unknown` for what is no name."""
    return content if content and _is_text(content) else "unknown"


def check_tensor(path: Path, what: str, tensor: torch.Tensor) -> None:
    """Raise `RotationZooError` for what is no plain table of real numbers, such as a sparse,
    quantized or complex one."""
    plain = tensor.layout == torch.strided and tensor.dtype in _REAL and tensor.ndim
    if not plain or not tensor.numel():
        raise RotationZooError(
            f"the {what} in {path.name} is no table of real numbers", hint="do not use it"
        )


def check_regular(path: Path) -> None:
    """Raise `RotationZooError` for what is no file, or one that could be waited for for ever, such
    as a pipe or a device."""
    if not path.exists():
        raise RotationZooError(f"there is no file {path}", hint="check the path")
    if not path.is_file():
        raise RotationZooError(f"{path} is no regular file", hint="give a file")


def power_of_two(engine: str, geometry: Geometry) -> None:
    """Raise `RotationZooError` for an engine that runs powers of two alone."""
    dims = sorted(
        {dim for layer in cached_layers(geometry) for dim in (layer.key_dim, layer.value_dim)}
    )
    for dim in dims:
        if dim & (dim - 1):
            raise RotationZooError(
                f"{engine} cannot run head dimension {dim}: only powers of two", hint=OTHERS
            )


def one_dim(engine: str, geometry: Geometry) -> None:
    """Raise `RotationZooError` for an engine whose keys and values have the same head dimension."""
    for layer in cached_layers(geometry):
        if layer.key_dim != layer.value_dim:
            raise RotationZooError(
                f"{engine} cannot run keys of dimension {layer.key_dim} with values of dimension {layer.value_dim}",
                hint=OTHERS,
            )


def one_group(engine: str, geometry: Geometry, serving: "Payload") -> None:
    """Raise `RotationZooError` where an engine's one group size cannot mean the whole head of every
    layer."""
    dims = {dim for layer in cached_layers(geometry) for dim in (layer.key_dim, layer.value_dim)}
    if serving.group_size is None and len(dims) > 1:
        raise RotationZooError(
            f"{engine} takes one group size, and this artifact's groups are whole heads of {sorted(dims)} channels",
            hint=OTHERS,
        )


OTHERS = "docs/engines.md says what each engine takes"


def identity_like(side: Side, geometry: Geometry) -> Side:
    """For engines that insist on a value rotation where the weights carry it: one that does
    nothing."""
    dims = {layer.index: layer.value_dim for layer in cached_layers(geometry)}
    return Side({layer: torch.eye(dims[layer]) for layer in side.rotation}, "identity")


def number(ratio: float, off: float) -> str:
    """A clip ratio as text, 1 as the engine's own word for no clipping."""
    return f"{off if ratio == 1 else ratio:g}"
