"""`zoo_index.json`: what has been published, where, and with which hashes. Read, validated,
extended, written."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from rotationzoo.artifact.manifest import ROTATIONS, Sha256
from rotationzoo.artifact.results import EvaluationSummary
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import files, strict_json

SCHEMA = 1
NAME = "zoo_index.json"
WHEEL_COPY = Path(__file__).parents[1] / "data" / NAME
HUBS = ("huggingface", "modelscope")
Hub = Literal["huggingface", "modelscope"]
REPOSITORY = r"^[\w][\w.-]*/[\w][\w.-]*$"
RepoId = Annotated[str, Field(pattern=REPOSITORY, max_length=200)]
Place = Annotated[str, AfterValidator(files.plain)]
"""A path inside a folder, as it becomes one here."""
Name = Annotated[Place, Field(pattern="^[^/]*$")]
_ANOTHER = "tell its owners, or name another one with --index"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Copy(_Frozen):
    """One place that holds the files: a folder of a repository at a revision."""

    hub: Hub
    repo: RepoId
    path: Annotated[str, AfterValidator(lambda path: path and files.plain(path))]
    """The folder inside the repository; empty for the whole of one, or where nobody has seen the
    folder."""
    revision: Place | None = None
    """A commit on Hugging Face, a tag on ModelScope; None where the index came with the files, or
    nobody has looked."""


class File(_Frozen):
    """Size and sha256 of a file; None where nobody has published them."""

    size: Annotated[int, Field(ge=0)] | None = None
    sha256: Sha256 | None = None


class Entry(_Frozen):
    """One published rotation of one model."""

    model: RepoId | Name
    """Hub id, or the name of a model that is on no hub, such as `demo`."""
    model_revision: Place | None = None
    config_sha256: Sha256 | None = None
    weights_fingerprint: Sha256 | None = None
    format: Literal["rotationzoo", "oscar", "latent", "gguf"] = "rotationzoo"
    """Of what OSCAR's makers publish, `oscar`: two `.pt` files; `latent`: a matrix a layer for the
    latent that MLA stores, which nothing here reads; `gguf`: a whole model with rotations in it,
    which is listed and not pulled."""
    note: Annotated[str, Field(max_length=500)] | None = None
    """What a reader of the list should know of it, in a sentence."""
    recipe: Name
    recipe_sha256: Sha256 | None = None
    geometry: list[dict[str, bool | int]] | None = None
    files: dict[Name, File]
    copies: list[Copy]
    evaluation: dict[str, Any] | None = None
    """What `evaluate` measured, in short."""
    validation: dict[str, Any] | None = None
    created: Annotated[str, Field(pattern=r"^[0-9T:Z.+-]{1,40}$")] | None = None
    """Day of publication, ISO 8601."""

    @model_validator(mode="after")
    def _hashes_of_our_own_files(self) -> "Entry":
        if not self.copies or (self.pullable and not self.files):
            raise ValueError("an entry needs files and a place that holds them")
        if self.pullable and not all(copy.path for copy in self.copies):
            raise ValueError("files to be pulled need a folder that holds them")
        if self.format == "rotationzoo" and not all(
            file.sha256 and file.size is not None for file in self.files.values()
        ):
            raise ValueError("every file of a rotationzoo artifact needs a size and a sha256")
        if self.format == "rotationzoo" and ROTATIONS not in self.files:
            raise ValueError(f"a rotationzoo artifact needs {ROTATIONS}")
        return self

    @field_validator("evaluation")
    @classmethod
    def _as_in_a_manifest(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            EvaluationSummary.model_validate(value)
        return value

    @property
    def pullable(self) -> bool:
        """Whether `pull` can fetch and check it; the others are listed so that they are known."""
        return self.format in ("rotationzoo", "oscar")

    @property
    def identity(self) -> str:
        """What tells one entry from another: the sha256 of its rotations, or the place of files
        without hashes."""
        if self.format == "rotationzoo":
            return self.files[ROTATIONS].sha256 or ""
        return f"{self.copies[0].repo}/{self.copies[0].path}"


class Index(_Frozen):
    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    entries: list[Entry] = []

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True
    )

    @model_validator(mode="after")
    def _no_duplicates(self) -> "Index":
        seen: set[str] = set()
        for entry in self.entries:
            key = f"{entry.model} {entry.identity}"
            if key in seen:
                raise ValueError(
                    f"{entry.model} is listed twice with the same files ({entry.identity[:12]})"
                )
            seen.add(key)
        return self

    def extended(self, entry: Entry) -> "Index":
        """With one entry more. The same files of the same model again add their places to the entry
        that is there, and bring what was measured since."""
        others = [e for e in self.entries if (e.model, e.identity) != (entry.model, entry.identity)]
        for earlier in self.entries:
            if earlier not in others:
                places = {(copy.hub, copy.repo): copy for copy in (*earlier.copies, *entry.copies)}
                entry = entry.model_copy(
                    update={
                        "copies": list(places.values()),
                        "created": earlier.created or entry.created,
                    }
                )
        return Index(entries=_sorted([*others, entry]))

    def text(self) -> str:
        """As JSON that changes no more than it must: entries and keys sorted; a hash or revision
        that nobody knows is null."""
        entries = [
            entry.model_dump(exclude_none=True)
            | {"copies": [copy.model_dump() for copy in entry.copies]}
            | {"files": {name: file.model_dump() for name, file in entry.files.items()}}
            for entry in _sorted(list(self.entries))
        ]
        return (
            json.dumps({"schema": self.schema_, "entries": entries}, indent=2, sort_keys=True)
            + "\n"
        )


def parse(text: str | bytes, origin: str) -> Index:
    """Raises `RotationZooError`, naming `origin`, for what is no index, or one of a newer
    schema."""
    content = strict_json.parse(text, origin, _ANOTHER)
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise RotationZooError(f"{origin} is no index: it is no table with a schema", hint=_ANOTHER)
    if schema != SCHEMA:
        raise RotationZooError(
            f"{origin} has schema {schema}; this rotationzoo reads schema {SCHEMA}",
            hint="upgrade rotationzoo",
        )
    return strict_json.validate(Index, content, origin, _ANOTHER)


def read(path: Path) -> Index:
    """The index at a path that the user names, which may be a link. Raises `RotationZooError`."""
    return parse(files.read(Path(os.path.realpath(path)), strict_json.LIMIT), str(path))


def _sorted(entries: list[Entry]) -> list[Entry]:
    return sorted(
        entries,
        key=lambda entry: (
            entry.model.lower(),
            entry.format != "rotationzoo",
            entry.recipe,
            entry.identity,
        ),
    )
