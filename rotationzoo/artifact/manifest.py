"""The schema of an artifact's manifest. `verify` checks whether its statements are true."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from rotationzoo.recipe import Recipe, digest
from rotationzoo.sides import HEADS, LATENTS, CachedRows, rows_of
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import plain, read_json
from rotationzoo.storage.strict_json import Count, Sha256, Strict

if TYPE_CHECKING:
    from rotationzoo.artifact.measured import Summary
else:
    # Only a manifest with an evaluation needs the types of one.
    Summary = Any

SCHEMA = 1
ROTATIONS, STATISTICS = "rotations.safetensors", "statistics.safetensors"
# Limits, so that no forged geometry asks for absurdly large tensors.
_Number = Annotated[int, Field(ge=0, le=1 << 16)]
_Size = Annotated[int, Field(ge=1, le=1 << 16)]
# A name may not lead out of the artifact's folder.
PlainName = Annotated[str, AfterValidator(plain), Field(pattern="^[^/]*$")]
_Primitive = str | int | float | bool


class File(Strict):
    """The size and hash of one file of the artifact."""

    size: Count
    sha256: Sha256


class Model(Strict):
    """The model that the rotations were made for. The fingerprint is None for rotations that depend
    only on shapes, and for files that were imported without weights."""

    id: str
    architecture: str
    revision: str | None
    license: str | None = None
    config_sha256: Sha256
    weights_fingerprint: Sha256 | None


class Layer(Strict, extra="forbid"):
    """An attention layer. `owner`: the layer whose cache it reads, usually the layer itself."""

    index: _Number
    owner: _Number
    query_heads: _Size
    kv_heads: _Size
    key_dim: _Size
    value_dim: _Size
    shift_invariant: bool | None = None
    rope_dim: Count | None = None


class Calibration(Strict):
    """The text that the statistics were collected on."""

    source: str
    tokens: Count
    rows: Count
    media_tokens: Count | None = None
    """How many of `tokens` are images or audio."""
    fingerprint: Sha256
    note: str | None = None


class ForeignFile(File):
    """A file that rotations were imported from."""

    name: str


class Imported(Strict):
    """The origin of imported rotations, and the metadata of their files."""

    format: str
    files: dict[str, ForeignFile]
    objectives: dict[str, str]
    calibration: dict[str, _Primitive]
    notes: list[str]

    @model_validator(mode="after")
    def _both_sides(self) -> "Imported":
        sides = set(rows_of(self.files).sides)
        if set(self.files) != sides or set(self.objectives) != sides:
            raise ValueError("it needs a file and an objective of keys and of values")
        return self


class Run(Strict):
    """How long the job took, and on which device."""

    seconds: float
    peak_memory_bytes: Count | None
    device: str | None = None
    dtype: str | None = None


class Versions(Strict):
    """The versions of rotationzoo and of other libraries, as extra keys."""

    rotationzoo: str


class ValidationSummary(Strict):
    """The summary of a `validate` that passed."""

    device: str
    rows: Count


class Metrics(Strict):
    """The measurements of the rotations so far."""

    orthogonality_error: float
    evaluation: Summary | None = None
    validation: ValidationSummary | None = None

    @field_validator("evaluation")
    @classmethod
    def _a_summary(cls, content: Any) -> Any:
        from rotationzoo.artifact import measured

        return None if content is None else _validate(measured.Summary, content)


class Manifest(Strict):
    """`manifest.json` of schema 1."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    model: Model
    geometry: list[Layer]
    recipe: dict[str, Any]
    recipe_sha256: Sha256
    calibration: Calibration | None
    identity: dict[str, _Primitive | None]
    versions: Versions
    run: Run
    metrics: Metrics
    files: dict[PlainName, File]
    notes: list[str] = Field(default=[])
    imported: Imported | None = None

    @property
    def rotations_sha256(self) -> str:
        """The artifact's identity: the sha256 of `rotations.safetensors`."""
        return self.files[ROTATIONS].sha256

    @property
    def cached(self) -> CachedRows:
        """What the model caches, as in `geometry.cached_rows`."""
        dims = {layer.rope_dim for layer in self.geometry}
        return HEADS if dims == {None} else LATENTS

    @field_validator("geometry")
    @classmethod
    def _layers_once(cls, layers: list[Layer]) -> list[Layer]:
        owners = {layer.index for layer in layers if layer.owner == layer.index}
        indices = {layer.index for layer in layers}
        if not owners or len(indices) != len(layers):
            raise ValueError("a layer is listed twice, or none has its own cache")
        for layer in layers:
            # A layer that fills a shared cache runs before its readers.
            if layer.owner not in owners or layer.owner > layer.index:
                cache = f"the cache of layer {layer.owner}"
                raise ValueError(f"layer {layer.index} reads {cache}, which has none before it")
        return layers

    @field_validator("recipe")
    @classmethod
    def _a_recipe(cls, content: dict[str, Any]) -> dict[str, Any]:
        _validate(Recipe, content, strict=False)
        return content

    @field_validator("files")
    @classmethod
    def _with_rotations(cls, files: dict[str, File]) -> dict[str, File]:
        if ROTATIONS not in files:
            raise ValueError(f"{ROTATIONS} is not among them")
        return files


def _validate(kind: type[BaseModel], content: Any, strict: bool = True) -> BaseModel:
    """Validate content. Raises `ValueError`, which says where it is wrong."""
    try:
        return kind.model_validate(content, strict=strict)
    except pydantic.ValidationError as error:
        raise ValueError(strict_json.first_problem(error)) from error


def parse_manifest(content: dict[str, Any], origin: str) -> Manifest:
    """The typed manifest. Raises `RotationZooError`, naming `origin`, if it is damaged."""
    return strict_json.validate(Manifest, content, origin)


def hash_config(folder: Path, unquantized: bool = False) -> str:
    """The sha256 of a model's `config.json`, with sorted keys and without the library version;
    if `unquantized`, of that before quantization."""
    config = read_json(folder / "config.json")
    for key in ["transformers_version"] + ["quantization_config"] * unquantized:
        config.pop(key, None)
    return digest(config)
