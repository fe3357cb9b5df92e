"""The schema of a recipe: each key's type, default, meaning and checks, and what is published."""

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from rotationzoo.budget import Budget
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.linalg.composition_table import COMPOSITIONS, GIVEN, needs_statistics
from rotationzoo.sides import cost_kinds, read_as
from rotationzoo.words import nearest

_PATTERN = re.compile(r"(?P<kind>yarn|linear):(?P<factor>\d+(\.\d+)?)(:(?P<positions>\d+))?")


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling to more positions than a model was trained on."""

    kind: str  # a `rope_type` of transformers
    factor: float  # the factor by which the positions increase
    positions: int | None = None
    """The positions that the model was trained on; None means those in its config."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `KIND:FACTOR` or `KIND:FACTOR:POSITIONS`. Raises `ValueError`."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError("must be written as yarn:4, yarn:4:32768 or linear:2")
        positions = int(match["positions"]) if match["positions"] else None
        scaling = cls(match["kind"], float(match["factor"]), positions)
        if scaling.factor <= 1 or positions == 0:
            raise ValueError("must have a factor above 1, and positions above 0")
        return scaling

    def __str__(self) -> str:
        text = f"{self.kind}:{self.factor:g}"
        return text if self.positions is None else f"{text}:{self.positions}"


def normalize(text: str) -> str:
    """The same scaling in its shortest form, `yarn:4` for `yarn:4.0`. Raises `ValueError`."""
    return str(RopeScaling.parse(text))


Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # the range of torch's seeds
Count = Annotated[int, Field(gt=0, le=10**6)]
Tokens = Annotated[int, Field(gt=0, le=10**8)]
# Keys that were added later: recipes without them keep their published hash.
_LATER = Field(exclude_if=lambda value: not value)
_UNLESS_FISHER = Field(exclude_if=lambda value: value == "fisher")
GONE = {"feedback": False, "whiten": False}
"""Removed keys with their defaults, so that published recipes keep their hash."""
_DAY = pydantic.BeforeValidator(lambda day: date.fromisoformat(str(day)).isoformat())
WindowSize = Annotated[int, Field(ge=0, le=10**9)]


class Section(BaseModel):
    """An immutable table of recipe keys. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


FILES = (".jsonl", ".txt", ".parquet")
"""Suffixes of text files. A `data.source` without one of them is a data set id."""


def digest(content: dict[str, Any]) -> str:
    """sha256 of a table as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def name_of(place: str) -> str:
    """The publishable name of a place: the last part of a path, or a whole hub id or URL."""
    # A slash alone does not make a path: hub ids such as Qwen/Qwen3-8B have one.
    is_path = place.startswith(("/", "./", "../", "~")) or Path(place).suffix.lower() in FILES
    return Path(place).name if is_path and "://" not in place else place


class Data(Section):
    """The calibration text and how it is cut into token rows."""

    source: str = "bundled"
    """`bundled`, a `.jsonl`, `.txt` or `.parquet` file, or a data set id on the hub."""
    subset: str | None = None  # the data set's configuration
    split: str = "train"
    column: str | None = None
    """Column of text or chat messages. None: the first of `text`, `messages`, `conversations`."""
    packing: Literal["packed"] = "packed"
    """Documents are joined and cut into rows of exactly `length` tokens."""
    tokens: Tokens = 32768  # tokens of all rows together
    length: Annotated[Tokens, Field(gt=1)] = 2048  # tokens per row
    seed: Seed = 0  # sets the order of the documents
    images: Annotated[str | None, _LATER] = None
    """Column of a document's images: one or a list, as bytes or as paths relative to the file."""
    audio: Annotated[str | None, _LATER] = None
    """The same for audio, as WAV. With either of them, each row is a document."""
    date: Annotated[Annotated[str, _DAY] | None, _LATER] = None
    """The day that chat templates write as today's. None means the day of the first run."""

    @property
    def media(self) -> dict[str, str]:
        """The columns of `image` and `audio`, if they are read."""
        columns = {"image": self.images, "audio": self.audio}
        return {kind: column for kind, column in columns.items() if column is not None}

    @property
    def rows(self) -> int:
        """The number of rows of text, if there is enough text."""
        return self.tokens // self.length

    @property
    def usual_batch(self) -> int:
        """The default number of rows of a forward pass: up to four, and up to 8,192 tokens."""
        return max(1, min(4, 8192 // self.length))

    @property
    def label(self) -> str:
        return name_of(self.source)


class Recipe(Section):
    """Every choice that decides the rotations, and the cache that they are for."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=100)] = "oscar"
    """Part of the default output folder."""
    model: str | None = None  # the model that a released configuration is meant for
    key_statistic: Literal["query", "key"] = "query"
    """`query`: second moment `C_Q` of the queries that read the keys. `key`: that of the keys."""
    value_statistic: Literal["output", "key_energy", "value"] = "output"
    """`output`: second moment of the attention outputs, `C_S = V^T S^T S V`. `key_energy`: its
    published substitute, values weighted by `k C_Q k^T`, in two passes. `value`: that of values."""
    pooling: Literal["head", "layer"] = "head"
    """One rotation per KV head, or one per layer, fitted to the mean of its heads' moments."""
    composition: str = "r_h_pbr"
    """The rotation's factors, left to right: a name from `composition_table.COMPOSITIONS`."""
    center_keys: bool = False
    """Subtract each KV head's mean key before the rotation, if attention ignores it."""
    center_values: bool = False
    """Subtract each KV head's mean value; the reader adds it back, times the attention received."""
    transform: Annotated[bool, _LATER] = False
    """Also store a transform coding: uncorrelated channels of 0 to 8 bits, by the cost of error."""
    metric: Annotated[Literal["fisher", "attention"], _UNLESS_FISHER] = "fisher"
    """With `transform`, the cost of errors. `fisher`: by gradients, in a backward pass.
    `attention`: `C_Q` for keys and `C_S` for values, times the measured loss of each side of each
    layer."""
    draws: Annotated[Count | None, _LATER] = None
    """With `fisher`, how often gradients are drawn for each text. None: 2."""
    bits: float | None = None
    """With `transform`, the average bits per element of quantized rows, with scales."""
    key_bits: float | None = None
    value_bits: float | None = None  # the same for keys and for values, instead of `bits`
    exclude_sink: bool = True
    """Leave each row's first `sink` tokens out of key and value sums: they are never quantized."""
    key_clip: Annotated[float, Field(gt=0, le=1)] = 0.96
    value_clip: Annotated[float, Field(gt=0, le=1)] = 0.92
    """Clip ratios: the quantile of a row's magnitudes at which it is clamped; 1 is off."""
    group_size: Count | None = None  # channels that share a scale; None means the whole head
    sink: WindowSize = 64
    recent: WindowSize = 256
    """First (`sink`) and last (`recent`) tokens of a request that stay exact."""
    seed: Seed = 0  # the seed of the composition `random`
    rope_scaling: Annotated[str, AfterValidator(normalize)] | None = None
    """RoPE scaling: `yarn:4`, `linear:2`, or `yarn:4:32768` with the trained positions."""
    data: Data = Data()

    @model_validator(mode="before")
    @classmethod
    def _without_error_feedback(cls, content: dict[str, Any]) -> dict[str, Any]:
        """Raises `RotationZooError` for a recipe with error feedback."""
        if any(content.get(key) for key in GONE):
            problem = "the recipe has error feedback, which transform coding has replaced"
            raise RotationZooError(problem, "calibrate again: rotationzoo calibrate MODEL")
        return {key: value for key, value in content.items() if key not in GONE}

    @field_validator("composition")
    @classmethod
    def _known_composition(cls, value: str) -> str:
        if value not in (*COMPOSITIONS, GIVEN):
            names = ", ".join(COMPOSITIONS)
            raise ValueError(f"must be one of {names}{nearest(value, COMPOSITIONS)}")
        return value

    @model_validator(mode="after")
    def _possible_budget(self) -> "Recipe":
        try:
            has_budget = bool(self.budget)
        except UsageError as error:
            raise ValueError(str(error)) from error
        if has_budget != self.transform:
            raise ValueError("a budget of bits and transform coding need each other")
        if self.draws and not self.goes_back:
            raise ValueError("draws needs transform: true and metric: fisher")
        return self

    @property
    def budget(self) -> Budget:
        return Budget(self.bits, self.key_bits, self.value_bits)

    @property
    def hash(self) -> str:
        return digest(self.published())

    def published(self) -> dict[str, Any]:
        """The recipe as JSON, without paths of local files and folders."""
        content, model = self.model_dump(), self.model and name_of(self.model)
        data = content["data"] | {"source": self.data.label}
        return content | {"model": model, "data": data} | GONE

    @property
    def has_eigenbasis(self) -> bool:
        """Whether the composition contains the eigenbasis of a statistic."""
        return needs_statistics(self.composition)

    @property
    def needs_statistics(self) -> bool:
        """False for data-free recipes, which read no text and run no model."""
        return self.has_eigenbasis or bool(self.centered) or self.transform

    @property
    def goes_back(self) -> bool:
        """Whether the model runs backward, too."""
        return self.transform and self.metric == "fisher"

    @property
    def centered(self) -> tuple[str, ...]:
        """The sides, of `key` and `value`, that are stored without their mean."""
        centers = {"key": self.center_keys, "value": self.center_values}
        return tuple(side for side, centered in centers.items() if centered)

    def centers(self, side: str) -> bool:
        """Whether a side is stored without its mean: a latent if keys or values are."""
        return not set(self.centered).isdisjoint(read_as(side))

    def clip(self, side: str) -> float:
        """The clip ratio of a side; of a latent, the larger of the two."""
        ratios = {"key": self.key_clip, "value": self.value_clip}
        return max(ratios[part] for part in read_as(side))

    def target_kinds(self, side: str) -> tuple[str, ...]:
        """The statistics whose sum a side's eigenbasis diagonalizes. For a latent: the costs
        `query` and `output`, or its own second moment. Empty for an impossible pair."""
        stated, parts = {"key": self.key_statistic, "value": self.value_statistic}, read_as(side)
        kinds = tuple(stated[part] for part in parts)
        if kinds == parts:
            return (side,)
        return kinds if len(kinds) == 1 or kinds == cost_kinds(side) else ()

    def group(self, dim: int) -> int:
        return self.group_size or dim
