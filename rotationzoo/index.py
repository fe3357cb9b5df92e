"""`zoo_index.json`: what has been published, where, and with which hashes. Read, validated, extended, written."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rotationzoo.errors import RotationZooError

SCHEMA = 1
NAME = "zoo_index.json"
WHEEL_COPY = Path(__file__).parent / "data" / NAME
HUBS = ("huggingface", "modelscope")
Hub = Literal["huggingface", "modelscope"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_ANOTHER = "tell its owners, or name another one with --index"
REPOSITORY = r"^[\w][\w.-]*/[\w][\w.-]*$"
RepoId = Annotated[str, Field(pattern=REPOSITORY)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Copy(_Frozen):
    """One place that holds the files: a folder of a repository at a revision."""

    hub: Hub
    repo: RepoId
    path: str
    """The folder inside the repository; empty for the whole of one, or where nobody has seen the folder."""
    revision: str | None = None
    """A commit on Hugging Face, a tag on ModelScope; None where the index came with the files, or nobody has looked."""

    @field_validator("path")
    @classmethod
    def _safe_path(cls, value: str) -> str:
        return value and safe(value)


class File(_Frozen):
    """Size and sha256 of a file; None where nobody has published them."""

    size: Annotated[int, Field(ge=0)] | None = None
    sha256: Sha256 | None = None


class Entry(_Frozen):
    """One published rotation of one model."""

    model: RepoId | Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Hub id, or the name of a model that is on no hub, such as `demo`."""
    model_revision: str | None = None
    config_sha256: Sha256 | None = None
    weights_fingerprint: Sha256 | None = None
    format: Literal["rotationzoo", "oscar", "latent", "gguf"] = "rotationzoo"
    """Of what OSCAR's makers publish, `oscar`: two `.pt` files; `latent`: a matrix a layer for the latent that MLA stores,
    which nothing here reads; `gguf`: a whole model with rotations in it, which is listed and not pulled."""
    note: Annotated[str, Field(max_length=500)] | None = None
    """What a reader of the list should know of it, in a sentence."""
    recipe: str
    recipe_sha256: Sha256 | None = None
    geometry: list[dict[str, bool | int]] | None = None
    files: dict[str, File]
    copies: list[Copy]
    evaluation: dict[str, Any] | None = None
    """What `evaluate` measured, in short."""
    validation: dict[str, Any] | None = None
    created: str | None = None
    """Day of publication, ISO 8601."""

    @field_validator("files")
    @classmethod
    def _safe_names(cls, value: dict[str, File]) -> dict[str, File]:
        for name in value:
            safe(name)
        return value

    @model_validator(mode="after")
    def _hashes_of_our_own_files(self) -> "Entry":
        if not self.copies or (self.pullable and not self.files):
            raise ValueError("an entry needs files and a place that holds them")
        if self.pullable and not all(copy.path for copy in self.copies):
            raise ValueError("files to be pulled need a folder that holds them")
        if self.format == "rotationzoo" and "rotations.safetensors" not in self.files:
            raise ValueError("a rotationzoo artifact needs rotations.safetensors")
        if self.format == "rotationzoo" and not all(file.sha256 and file.size is not None for file in self.files.values()):
            raise ValueError("every file of a rotationzoo artifact needs a size and a sha256")
        return self

    @property
    def pullable(self) -> bool:
        """Whether `pull` can fetch and check it; the others are listed so that they are known."""
        return self.format in ("rotationzoo", "oscar")

    @property
    def identity(self) -> str:
        """What tells one entry from another: the sha256 of its rotations, or the place of files without hashes."""
        if self.format == "rotationzoo":
            return self.files["rotations.safetensors"].sha256 or ""
        return f"{self.copies[0].repo}/{self.copies[0].path}"


class Index(_Frozen):
    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    entries: list[Entry] = []

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)

    @model_validator(mode="after")
    def _no_duplicates(self) -> "Index":
        seen: set[str] = set()
        for entry in self.entries:
            key = f"{entry.model} {entry.identity}"
            if key in seen:
                raise ValueError(f"{entry.model} is listed twice with the same files ({entry.identity[:12]})")
            seen.add(key)
        return self

    def extended(self, entry: Entry) -> "Index":
        """With one entry more. The same files of the same model again add their places to the entry that is there, and bring
        what was measured since."""
        others = [e for e in self.entries if (e.model, e.identity) != (entry.model, entry.identity)]
        for earlier in self.entries:
            if earlier not in others:
                places = {(copy.hub, copy.repo): copy for copy in (*earlier.copies, *entry.copies)}
                entry = entry.model_copy(update={"copies": list(places.values()), "created": earlier.created or entry.created})
        return Index(entries=_sorted([*others, entry]))

    def text(self) -> str:
        """As JSON that changes no more than it must: entries and keys sorted; a hash or revision that nobody knows is null."""
        entries = [
            entry.model_dump(exclude_none=True)
            | {"copies": [copy.model_dump() for copy in entry.copies]}
            | {"files": {name: file.model_dump() for name, file in entry.files.items()}}
            for entry in _sorted(list(self.entries))
        ]
        return json.dumps({"schema": self.schema_, "entries": entries}, indent=2, sort_keys=True) + "\n"


def parse(text: str | bytes, origin: str) -> Index:
    """Raises `RotationZooError`, naming `origin`, for what is no index, or one of a newer schema."""
    try:
        content = json.loads(text)
        schema = content["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RotationZooError(f"{origin} is no index: it is no JSON with a schema", hint=_ANOTHER) from error
    if schema != SCHEMA:
        raise RotationZooError(
            f"{origin} has schema {schema}; this rotationzoo reads schema {SCHEMA}", hint="upgrade rotationzoo"
        )
    try:
        return Index.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the list"
        said = problem["msg"].removeprefix("Value error, ")
        raise RotationZooError(f"{origin} is damaged at {where}: {said}", hint=_ANOTHER) from error


def read(path: Path) -> Index:
    try:
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise RotationZooError(f"{path} cannot be read: {error.strerror}", hint="check the path given with --index") from error


def safe(path: str) -> str:
    """The path itself. Raises `ValueError` for one that is absolute, leaves its folder or is not plain."""
    if not re.fullmatch(r"[\w.+-]+(/[\w.+-]+)*", path) or {".", ".."} & set(path.split("/")):
        raise ValueError(f"{path!r} is no path inside a folder")
    return path


def _sorted(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.model.lower(), entry.format != "rotationzoo", entry.recipe, entry.identity))
