"""What an engine is: what it can serve, what it is given of an artifact, and how it is launched.

Everywhere outside `formats/` a matrix is meant as in `x @ R`; each module there knows whether its
engine wants it transposed.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from rotationzoo.model.geometry import Geometry, cached_layers


@dataclass(frozen=True)
class SideMatrices:
    """The keys or the values of every layer, as an engine's file has them."""

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
        """Whether the KV heads of any layer have a matrix each."""
        return any(matrix.ndim == 3 for matrix in self.rotation.values())


@dataclass(frozen=True)
class Payload:
    """What an engine is given: an artifact, reduced to what the engine can serve and the user
    agreed to."""

    model: str | None
    """None where nobody has said which model it is for, and the numbers of heads are not known."""
    geometry: Geometry
    key: SideMatrices
    value: SideMatrices | None
    """None: the weights carry the value rotation already."""
    clips: Mapping[int, tuple[float, float]]
    """Layer -> clip ratio of keys and of values; 1 is off."""
    group_size: int | None
    """Channels that share a scale; None is the whole head."""
    sink: int
    recent: int
    provenance: Mapping[str, Any]

    @property
    def clip(self) -> tuple[float, float]:
        """The clip ratios of keys and of values, where all layers share them."""
        (shared,) = set(self.clips.values())
        return shared

    @property
    def largest_group(self) -> int:
        """Channels that share a scale in the layer with the most of them."""
        return self.group_size or max(layer.key_dim for layer in cached_layers(self.geometry))

    @property
    def head_dims(self) -> set[int]:
        """The head dimensions of keys and of values, of all layers."""
        layers = cached_layers(self.geometry)
        return {dim for layer in layers for dim in (layer.key_dim, layer.value_dim)}

    @property
    def value_or_identity(self) -> SideMatrices:
        """For engines that insist on a value rotation where the weights carry it: one that does
        nothing."""
        if self.value is not None:
            return self.value
        dims = {layer.index: layer.value_dim for layer in cached_layers(self.geometry)}
        matrices = {layer: torch.eye(dims[layer]) for layer in self.key.rotation}
        return SideMatrices(matrices, "identity")


@dataclass(frozen=True)
class Capabilities:
    """What an engine can serve. The rest stops an export, or is left out when the user asks."""

    heads: bool
    """A matrix for each KV head."""
    mean: bool
    """A key mean."""
    clip: Literal["one", "side", "layer"]
    """One clip ratio, one for keys and one for values, or two for each layer."""
    windows: bool
    """Exact windows: sink and recent tokens that are not quantized."""


@dataclass(frozen=True)
class Description:
    """What docs/engines.md says of an engine beside its `Capabilities`, in Markdown."""

    cache: str
    """The fork or pull request that has its 2-bit cache."""
    reads: str
    """The files that it reads."""
    limits: str
    """What else it cannot serve, or does in its own way."""


@dataclass(frozen=True)
class Launch:
    """How the engine is started with the files."""

    command: list[str]
    """May have more than one line."""
    environment: dict[str, str]
    notes: list[str]
    while_replaced: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while the folder of the files is put in place: a lock that running servers know."""


@dataclass(frozen=True)
class Options:
    """What only some engines need."""

    base: Path | None = None
    """The GGUF file that a copy is made of."""
    engine_hadamard: bool = False
    """Leave the last Hadamard transform to the engine, which applies its own."""
    model: str | None = None
    """The model that the base was converted from, to compare them; else the artifact's own model,
    where it is in the cache."""


class Engine(Protocol):
    """What each module of an engine defines. Adding one takes such a module in `formats/` and a row
    in `registry.py`."""

    CAPABILITIES: Capabilities
    DESCRIPTION: Description

    def check_payload(self, payload: Payload) -> None:
        """Raise `RotationZooError` for what the engine cannot run and nothing can be left out of,
        such as a head dimension."""

    def write_files(self, work: Path, final: Path, payload: Payload, options: Options) -> Launch:
        """Write the engine's files to the folder `work`, which is moved to `final` afterwards."""


def clip_text(ratio: float, off: float) -> str:
    """A clip ratio as text, with the engine's own number for no clipping, which is 1 here."""
    number = off if ratio == 1 else ratio
    return f"{number:g}"
