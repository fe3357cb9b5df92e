"""The recipe: every choice that decides which rotation comes out, in one frozen object that is
hashed and stored."""

import difflib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.linalg.compositions import COMPOSITIONS, GIVEN, needs_statistics

SELF = "self"  # text that the model writes itself, as `Data.source`
FILES = (".jsonl", ".txt", ".parquet")  # of text; anything else is a data set's id

_PLACES = ("source", "prompts")  # keys of `Data` that may be paths


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Data(_Frozen):
    """The calibration text and how it becomes token rows."""

    source: str = "bundled"
    """`bundled`, a `.jsonl`, `.txt` or `.parquet` file, a data set id on the hub, or `self`: the
    model's own text, which goes on from `prompts`."""
    prompts: str = "bundled"
    """Of `self`: where the prompts are, as `source`. Chats end where it is the model's turn."""
    prompt_tokens: Annotated[int, Field(gt=0)] = 256
    """Of `self`: so many first tokens of each `length` of a text are given. Chats are given whole,
    but for those that are longer than this and than half a row, which are left out."""
    subset: str | None = None
    """The data set's configuration."""
    split: str = "train"
    column: str | None = None
    """Column of the text or of the chat messages; None takes `text`, or else `messages`."""
    packing: Literal["packed", "mixed", "document"] = "packed"
    """`packed`: rows of exactly `length` tokens, documents joined; `mixed`: every second of them
    cut into halves; `document`: a row is one document's first tokens."""
    tokens: Annotated[int, Field(gt=0)] = 32768
    length: Annotated[int, Field(gt=1)] = 2048
    """Tokens a row."""
    seed: int = 0
    """Order of the documents; of `self` also what is drawn."""

    @property
    def row_lengths(self) -> list[int]:
        """Of the rows that `packed` and `mixed` text is cut into where there is enough of it."""
        half, lengths = self.length // 2, []
        for number in range(self.tokens // self.length):
            lengths += (
                [half, self.length - half]
                if self.packing == "mixed" and number % 2
                else [self.length]
            )
        return lengths

    @property
    def label(self) -> str:
        """The name of the source to publish."""
        return name_of(self.source)

    @field_validator("prompts")
    @classmethod
    def _prompts_of_self(cls, value: str, others: ValidationInfo) -> str:
        if value == SELF:
            raise ValueError("a model needs something to go on from")
        if value != "bundled" and others.data.get("source") != SELF:
            raise ValueError(
                "is for text that the model writes itself: --data self, or data.source = self"
            )
        return value


class Search(_Frozen):
    """Choosing rotations and clip ratios on calibration text that the statistics have not seen."""

    texts: Annotated[int, Field(gt=0)] = 16
    """Rows of the calibration text that are held out for choosing; at most a third of them."""
    queries: Annotated[int, Field(gt=0)] = 64
    """Sampled queries of a row."""
    starts: Annotated[int, Field(gt=0)] = 3
    """Closed forms of each head that learning starts from."""
    steps: Annotated[int, Field(ge=0)] = 300
    """Steps of learning; 0 chooses among closed forms alone."""
    rate: Annotated[float, Field(gt=0)] = 0.015
    """Of Adam, on the entries of the skew-symmetric matrix that turns a rotation."""
    format: Literal["sglang", "vllm", "mlx"] = "sglang"
    """The engine's 2-bit format that everything is tried in."""

    def held_out(self, rows: int) -> int:
        """How many of so many rows are held out for choosing."""
        return min(self.texts, rows // 3)


class Recipe(_Frozen):
    """How statistics become rotations, and the cache that they are made for."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "oscar"
    """Part of the default output folder."""
    model: str | None = None
    """The model a released configuration is meant for; `calibrate` says so when used with
    another."""
    key_statistic: Literal["query", "key"] = "query"
    """`query`: second moment of the queries that read the keys, `C_Q`; `key`: of the keys
    themselves."""
    value_statistic: Literal["output", "key_energy", "value"] = "output"
    """`output`: second moment of the attention outputs, `C_S = V^T S^T S V`; `key_energy`: the
    published code's stand-in, values weighted by `k C_Q k^T` (two passes); `value`: of the values
    themselves."""
    pooling: Literal["head", "layer"] = "head"
    """One rotation per KV head, or one per layer from the mean of its heads' moments."""
    composition: str = "r_h_pbr"
    center_keys: bool = False
    """Subtract each KV head's mean key before it is rotated and stored: a softmax ignores what all
    keys share."""
    center_values: bool = False
    """Subtract each KV head's mean value too; whoever reads them adds it to the output, times the
    attention that tokens got."""
    exclude_sink: bool = True
    """Leave the first `sink` tokens of each row, never quantized, out of the key and value sums."""
    key_clip: Annotated[float, Field(gt=0, le=1)] = 0.96
    value_clip: Annotated[float, Field(gt=0, le=1)] = 0.92
    """Clip ratios: the entry of the sorted magnitudes of a rotated row at which it is clamped; 1 is
    off."""
    group_size: Annotated[int | None, Field(gt=0)] = None
    """Channels that share a scale; None is the whole head."""
    sink: Annotated[int, Field(ge=0)] = 64
    recent: Annotated[int, Field(ge=0)] = 256
    """First and last tokens of a request that stay exact."""
    seed: int = 0
    """Of the composition `random`, and of the rows that a search learns from, step by step."""
    search: Search | None = None
    """None takes the composition and the clip ratios above for every head."""
    data: Data = Data()

    @field_validator("composition")
    @classmethod
    def _known_composition(cls, value: str) -> str:
        if value not in (*COMPOSITIONS, GIVEN):
            raise ValueError(
                f"must be one of {', '.join(COMPOSITIONS)}{_nearest(value, COMPOSITIONS)}"
            )
        return value

    @field_validator("search")
    @classmethod
    def _searched_by_head(cls, value: Search | None, others: ValidationInfo) -> Search | None:
        if value is not None and others.data.get("pooling") == "layer":
            raise ValueError(
                "a search chooses for every head, which pooling = layer does not leave it"
            )
        return value

    @property
    def hash(self) -> str:
        """sha256 of what is published of the recipe, as JSON with sorted keys."""
        return digest(self.published())

    def published(self) -> dict[str, Any]:
        """The recipe as JSON, with the names of local files and folders in place of their paths.
        What is in them is told by the fingerprints beside it."""
        return without_paths(self.model_dump())

    @property
    def has_eigenbasis(self) -> bool:
        return needs_statistics(self.composition)

    @property
    def needs_statistics(self) -> bool:
        """False for the data-free recipes, which read no text and run no model."""
        return self.has_eigenbasis or bool(self.centered) or self.search is not None

    @property
    def centered(self) -> tuple[str, ...]:
        """The sides that are stored without their mean."""
        return ("key",) * self.center_keys + ("value",) * self.center_values

    def group(self, dim: int) -> int:
        """The quantization group size for a head dimension."""
        return self.group_size or dim

    def yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


_MUCH = Data(
    tokens=262144, length=4096, packing="mixed"
)  # what is chosen on rows of one length is worse on others

PRESETS = {
    "oscar": Recipe(),
    "oscar-v1": Recipe(
        name="oscar-v1", value_statistic="key_energy", pooling="layer", exclude_sink=False
    ),
    "best": Recipe(name="best", center_keys=True, key_clip=0.9, search=Search(), data=_MUCH),
    "best-uncentered": Recipe(name="best-uncentered", key_clip=0.9, search=Search(), data=_MUCH),
    "hadamard": Recipe(name="hadamard", composition="hadamard"),
    "identity": Recipe(name="identity", composition="identity"),
    "random": Recipe(name="random", composition="random"),
}


def load(recipe: str) -> Recipe:
    """A preset by name, or a YAML file. A file may start from a preset with `extends: oscar` and
    change some of it.

    Raises `RotationZooError` naming the file, the key and what is wrong with it.
    """
    if recipe in PRESETS:
        return PRESETS[recipe]
    path = Path(recipe)
    if not path.is_file():
        raise RotationZooError(
            f"there is no recipe {recipe!r}{_nearest(recipe, PRESETS)}",
            hint=f"give one of {', '.join(PRESETS)}, or a YAML file such as configs/Qwen3-8B.yaml",
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RotationZooError(
            f"{path} is not readable YAML: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(content, dict):
        raise RotationZooError(
            f"{path} is no recipe: it holds no keys", hint="see configs/ for examples"
        )
    return from_dict(content, str(path))


def from_dict(content: dict[str, Any], origin: str) -> Recipe:
    """A recipe from parsed YAML or JSON; `origin` is named in errors."""
    content = {str(key): value for key, value in content.items()}
    base = str(content.pop("extends", "oscar"))
    if base not in PRESETS:
        raise RotationZooError(
            f"{origin} extends an unknown recipe {base!r}{_nearest(base, PRESETS)}"
        )
    preset = PRESETS[base].model_dump()
    data = content.pop("data", None) or {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise RotationZooError(f"{origin}: data must hold keys, such as source and tokens")
    try:
        return Recipe(**{**preset, **content, "data": {**preset["data"], **data}})
    except ValidationError as error:
        raise RotationZooError(
            f"{origin}: {_first_problem(error)}", hint="see docs/recipes.md for every key"
        ) from error


def digest(content: dict[str, Any]) -> str:
    """sha256 of a recipe's content, also of one that an earlier rotationzoo wrote with fewer
    keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def without_paths(content: dict[str, Any]) -> dict[str, Any]:
    """A recipe's content as `Recipe.published` has it, also of one that an earlier rotationzoo
    wrote with its paths."""
    named = {key: name_of(value) for key, value in content["data"].items() if key in _PLACES}
    model = content.get("model")
    return {**content, "model": model and name_of(model), "data": {**content["data"], **named}}


def name_of(place: str) -> str:
    """What may be published of a place: of a path of this machine its last part, of a hub id or a
    URL all."""
    local = place.startswith(("/", "./", "../", "~")) or Path(place).suffix.lower() in FILES
    return Path(place).name if local and "://" not in place else place


def override(recipe: Recipe, **data: Any) -> Recipe:
    """The recipe with the `data` settings that are not None put in; flags come this way. A
    data-free recipe has no other use for `seed` than its own. Raises `UsageError`."""
    changes = {key: value for key, value in data.items() if value is not None}
    content = {**recipe.model_dump(), "data": {**recipe.data.model_dump(), **changes}}
    if "seed" in changes and not recipe.has_eigenbasis:
        content["seed"] = changes["seed"]
    try:
        return from_dict(content, "the options")
    except RotationZooError as error:
        raise UsageError(str(error), error.hint) from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    key = str(problem["loc"][-1])
    if problem["type"] == "extra_forbidden":
        parts: dict[Any, type[_Frozen]] = {"data": Data, "search": Search}
        return (
            f"unknown key {key!r}{_nearest(key, parts.get(problem['loc'][0], Recipe).model_fields)}"
        )
    return f"{key} = {problem['input']!r}: {problem['msg'].removeprefix('Value error, ').lower()}"


def _nearest(word: str, known: Any) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
