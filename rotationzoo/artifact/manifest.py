"""What the JSON files of an artifact must hold, so that every command meets only well-typed data.

Keys that a command reads without asking are required here; what only some artifacts have is
optional. Whether it is true is asked by `verify`.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import SELF, Recipe
from rotationzoo.rotations import SIDES
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import plain
from rotationzoo.storage.strict_json import Strict

SCHEMA = 1
ROTATIONS, STATISTICS = "rotations.safetensors", "statistics.safetensors"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
_Number = Annotated[int, Field(ge=0, le=1 << 16)]
_Size = Annotated[int, Field(ge=1, le=1 << 16)]
_Name = Annotated[str, AfterValidator(plain), Field(pattern="^[^/]*$")]
_Primitive = str | int | float | bool


class File(Strict):
    size: Count
    sha256: Sha256


class Model(Strict):
    id: str
    architecture: str
    revision: str | None
    license: str | None = None
    config_sha256: Sha256 | None
    weights_fingerprint: Sha256 | None


class Layer(Strict, extra="forbid"):
    index: _Number
    owner: _Number
    query_heads: _Size
    kv_heads: _Size
    key_dim: _Size
    value_dim: _Size
    shift_invariant: bool | None = None


class Calibration(Strict):
    source: str
    tokens: Count
    rows: Count
    fingerprint: Sha256
    note: str | None = None
    prompts: str | None = None
    sampling: str | None = None

    @model_validator(mode="after")
    def _of_the_models_own(self) -> "Calibration":
        if self.source == SELF and (self.prompts is None or self.sampling is None):
            raise ValueError("text that a model wrote itself needs prompts and sampling")
        return self


class ForeignFile(Strict):
    name: str
    size: Count
    sha256: Sha256


class Imported(Strict):
    format: str
    files: dict[str, ForeignFile]
    objectives: dict[str, str]
    calibration: dict[str, _Primitive]
    notes: list[str]

    @model_validator(mode="after")
    def _both_sides(self) -> "Imported":
        if set(self.files) != set(SIDES) or set(self.objectives) != set(SIDES):
            raise ValueError("it needs a file and an objective of keys and of values")
        return self


class _Clip(Strict):
    clip: float


_Sides = Literal["own", "keys", "values", "both"]


class _Kept(Strict):
    key: _Clip
    value: _Clip
    by_side: dict[_Sides, float]
    kept: _Sides
    trimmed: float


class _Chosen(Strict):
    candidate: list[str]
    chosen: list[float]

    @model_validator(mode="after")
    def _for_each_head(self) -> "_Chosen":
        if len(self.candidate) != len(self.chosen):
            raise ValueError("not every head has a candidate and its score")
        return self


class ChosenSides(Strict):
    key: _Chosen
    value: _Chosen


class Search(Strict):
    model: _Kept
    layers: dict[Annotated[str, Field(pattern="^[0-9]{1,5}$")], ChosenSides]


class _Arm(Strict):
    perplexity_increase: float
    attention_kl: float | None
    output_error: float
    # Missing in what earlier versions measured, as texts and verdict are.
    standard_error: dict[str, float | None] = Field(default={})


class EvaluationSummary(Strict):
    text: str
    tokens: Count
    perplexity: float
    format: str
    sink: Count
    recent: Count
    arms: dict[str, _Arm]
    texts: Count | None = None
    verdict: list[str] = Field(default=[])
    prefill_chunk: Count | None = None
    prefill_layout: str | None = None


class ValidationSummary(Strict):
    on_gpu: bool
    device: str
    rows: Count
    codes_equal: bool | None
    dequantized_equal: bool | None


class Metrics(Strict):
    orthogonality_error: float
    evaluation: EvaluationSummary | None = None
    validation: ValidationSummary | None = None


class Run(Strict):
    seconds: float
    peak_memory_bytes: Count | None
    device: str | None = None
    dtype: str | None = None


class Versions(Strict):
    rotationzoo: str


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
    files: dict[_Name, File]
    notes: list[str] = Field(default=[])
    imported: Imported | None = None
    search: Search | None = None

    @property
    def clip_ratios(self) -> dict[str, float]:
        """`key` and `value`: the ratios to serve with, which a search finds and any other recipe
        says."""
        if self.search is not None:
            return {"key": self.search.model.key.clip, "value": self.search.model.value.clip}
        return {side: self.recipe[f"{side}_clip"] for side in ("key", "value")}

    @field_validator("imported", "search")
    @classmethod
    def _missing_or_whole(cls, value: Imported | Search | None) -> Imported | Search:
        if value is None:
            raise ValueError("null, which is neither missing nor whole")
        return value

    @field_validator("geometry")
    @classmethod
    def _layers_once(cls, layers: list[Layer]) -> list[Layer]:
        owners = {layer.index for layer in layers if layer.owner == layer.index}
        if not owners or len({layer.index for layer in layers}) != len(layers):
            raise ValueError("a layer is there twice, or none has a cache of its own")
        for layer in layers:
            if layer.owner not in owners or layer.owner > layer.index:
                raise ValueError(
                    f"layer {layer.index} reads the cache of layer {layer.owner}, which has none before it"
                )
        return layers

    @field_validator("recipe")
    @classmethod
    def _a_recipe(cls, content: dict[str, Any]) -> dict[str, Any]:
        try:
            Recipe.model_validate(content)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(
                f"{'.'.join(map(str, problem['loc']))[:80]}: {problem['msg']}"
            ) from error
        return content

    @field_validator("files")
    @classmethod
    def _with_rotations(cls, files: dict[str, File]) -> dict[str, File]:
        if ROTATIONS not in files:
            raise ValueError(f"{ROTATIONS} is not among them")
        return files


class _ByLayer(Strict):
    layer: Count
    output_error: float
    attention_kl: float | None


class _LayersOfArm(Strict):
    by_layer: list[_ByLayer]


class _Window(Strict):
    arms: dict[str, _LayersOfArm]


class EvaluationReport(Strict):
    """`evaluation.json`, as far as pictures are drawn from it."""

    own_arm: str
    windows: Annotated[list[_Window], Field(min_length=1)]


def read(path: Path) -> dict[str, Any]:
    """The content of a manifest file, every key of it of the type that `Manifest` says. Raises
    `RotationZooError`."""
    content = strict_json.read(path)
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise RotationZooError(
            f"{path} is damaged: it is no table with a schema",
            hint="fetch or make the artifact again",
        )
    if schema != SCHEMA:
        raise RotationZooError(
            f"{path.parent} has schema {schema}; this rotationzoo reads schema {SCHEMA}",
            hint="upgrade rotationzoo",
        )
    parse(content, str(path))
    return content


def parse(content: dict[str, Any], origin: str) -> Manifest:
    """The content of a manifest, typed. Raises `RotationZooError`, naming `origin`, for what no
    reader would take."""
    return strict_json.validate(Manifest, content, origin)
