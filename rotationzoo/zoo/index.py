"""The schema of `zoo_index.json`: which rotations are published, where, and with which hashes."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from rotationzoo.artifact.manifest import ROTATIONS, PlainName
from rotationzoo.artifact.measured import Summary, arms_of
from rotationzoo.artifact.scores import Decision
from rotationzoo.recipe.schema import normalize
from rotationzoo.storage import files, strict_json
from rotationzoo.storage.strict_json import Sha256
from rotationzoo.words import UNKNOWN, percent
from rotationzoo.zoo.hubs.protocol import HubName, PlaceName, is_folder

SCHEMA = 1
NAME = "zoo_index.json"
ROOT_FILES = NAME, "README.md", "config.json"
"""The files at the root of a repository."""
WHEEL_COPY = Path(__file__).parents[1] / "data" / NAME
REPOSITORY = r"^[\w][\w.-]*/[\w][\w.-]*$"
RepoId = Annotated[str, Field(pattern=REPOSITORY, max_length=200)]
GITHUB_ACTIONS = "https://token.actions.githubusercontent.com"
_Text = Annotated[str, Field(min_length=1, max_length=500)]
_Pem = Annotated[str, Field(pattern="^-----BEGIN PUBLIC KEY-----\n", max_length=1000)]
Place = Annotated[str, AfterValidator(files.plain)]
"""A relative path inside a folder, checked because it becomes a path on this machine."""


class _Frozen(BaseModel):
    # Unknown keys are refused: every version must understand what is downloaded and trusted.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Signer(_Frozen):
    """A signer: `identity` and `issuer` as in a Sigstore certificate, or an elliptic-curve public
    key in PEM. The identity of a workflow names its repository, its file, and the branch or tag."""

    identity: _Text | None = None
    issuer: _Text | None = None
    public_key: _Pem | None = None

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "Signer":
        named = {self.identity is not None, self.issuer is not None, self.public_key is None}
        if len(named) > 1:
            raise ValueError("a signer is an identity and its issuer, or a public key")
        return self

    @property
    def key_sha256(self) -> str | None:
        """The sha256 of the public key in PEM, which identifies the key in a signature."""
        return self.public_key and files.digest(self.public_key.encode())

    def __str__(self) -> str:
        if self.key_sha256 is not None:
            return describe_key(self.key_sha256)
        if self.issuer == GITHUB_ACTIONS:  # the identity is clearly a GitHub workflow
            return str(self.identity)
        return f"{self.identity} (of {self.issuer})"


def describe_key(sha256: str) -> str:
    """A key in words, from the sha256 of its PEM."""
    return f"the key {sha256[:16]}"


class _Growing(BaseModel):
    # Unknown keys of later versions are ignored, but kept when the index is extended.
    model_config = ConfigDict(
        extra="allow", frozen=True, protected_namespaces=(), populate_by_name=True
    )


class Copy(_Frozen):
    """A copy of an entry's files, in the folder `path` of a repository, `.` for that of the index.
    `revision`: a commit on Hugging Face, a tag on ModelScope, or None for the index's own."""

    hub: PlaceName
    repo: RepoId | Literal["."]
    path: Place
    revision: Place | None = None


class File(_Frozen):
    """The size in bytes and the sha256 of a file; None if they were not published."""

    size: Annotated[int, Field(ge=0)] | None = None
    sha256: Sha256 | None = None


class Listed(_Growing, allow_inf_nan=False):
    """Figures for `list`; None if not measured. The increase of perplexity is relative. Bits are of
    transform coding, or else of `sglang`, per element at 131,072 tokens, with windows."""

    perplexity_increase: float | None = None
    bits_per_element: Annotated[float, Field(gt=0)] | None = None


class Entry(_Growing):
    """One published rotation of one model.

    * `model`: the hub id, or the plain name of a model that is not on a hub, such as `demo`;
    * `format`: `rotationzoo` for an artifact, `oscar` for the two `.pt` files of OSCAR's authors;
    * `rope_scaling`: in calibration, such as `yarn:4`;
    * `created`: the day of publication, in ISO 8601;
    * `signer`: binding only in an index that the user named: anyone who can change the files of a
      repository can also change its index.
    """

    model: RepoId | PlainName
    model_revision: Place | None = None
    config_sha256: Sha256 | None = None
    weights_fingerprint: Sha256 | None = None
    format: Literal["rotationzoo", "oscar"] = "rotationzoo"
    note: Annotated[str, Field(max_length=500)] | None = None
    recipe: PlainName
    recipe_sha256: Sha256 | None = None
    rope_scaling: Annotated[str, AfterValidator(normalize)] | None = None
    geometry: list[dict[str, bool | int]] | None = None
    files: dict[PlainName, File]
    copies: list[Copy]
    evaluation: dict[str, Any] | None = None
    validation: dict[str, Any] | None = None
    summary: Listed | None = None
    created: Annotated[str, Field(pattern=r"^[0-9T:Z.+-]{1,40}$")] | None = None
    signer: Signer | None = None

    @model_validator(mode="after")
    def _can_be_checked(self) -> "Entry":
        if not self.copies or not self.files:
            raise ValueError("an entry needs files, and a place with them")
        if self.format == "rotationzoo":
            if any(None in (file.sha256, file.size) for file in self.files.values()):
                raise ValueError("every file of a rotationzoo artifact needs a size and a sha256")
            if ROTATIONS not in self.files:
                raise ValueError(f"a rotationzoo artifact needs {ROTATIONS}")
        return self

    @field_validator("evaluation")
    @classmethod
    def _as_in_a_manifest(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            Summary.model_validate(value)
        return value

    @property
    def measured(self) -> Summary | None:
        """The typed `evaluation`."""
        return None if self.evaluation is None else Summary.model_validate(self.evaluation)

    @property
    def decision(self) -> Decision | None:
        """The decision on these rotations in the evaluation; None without questions."""
        if (measured := self.measured) is None:
            return None
        own = {arm.name for arm in arms_of(measured.arms, self.identity)}
        decisions = measured.verdict.decisions
        return next((each for each in decisions if each.arm in own and each.interval), None)

    @property
    def identity(self) -> str:
        """The sha256 of the rotations, or the repository and folder of files without hashes."""
        if self.format == "rotationzoo":
            return self.files[ROTATIONS].sha256 or ""
        return f"{self.copies[0].repo}/{self.copies[0].path}"


class Statement(_Frozen):
    """Signed with the entries, against replays (TUF, sections 5.3 to 5.5): the repository, a rising
    `counter`, and the last day, in UTC, on which this may be the newest index."""

    hub: HubName
    repo: RepoId
    counter: Annotated[int, Field(ge=1, lt=2**53)]
    expires: Annotated[
        str,
        Field(pattern=r"^\d{4}-\d\d-\d\d$"),
        AfterValidator(lambda day: date.fromisoformat(day).isoformat()),
    ]


class Index(_Growing):
    """The content of `zoo_index.json`. An unsigned index has no statement."""

    schema_: Annotated[int, Field(alias="schema")] = SCHEMA
    entries: list[Entry] = []
    statement: Statement | None = None

    @model_validator(mode="after")
    def _no_duplicates(self) -> "Index":
        listed = [(entry.model, entry.identity) for entry in self.entries]
        for (model, identity), count in Counter(listed).items():
            if count > 1:
                raise ValueError(f"{model} is listed twice with the same files ({identity[:12]})")
        return self

    def extended(self, entry: Entry) -> "Index":
        """This index with one more entry. It is merged with an entry for the same rotations and
        model: copies of both, the newer measurements, and unknown keys."""
        others = []
        for listed in self.entries:
            if (listed.model, listed.identity) != (entry.model, entry.identity):
                others.append(listed)
                continue
            copies = {(copy.hub, copy.repo): copy for copy in (*listed.copies, *entry.copies)}
            changes = {**(listed.model_extra or {}), **(entry.model_extra or {})}
            changes["copies"] = list(copies.values())
            changes["created"] = listed.created or entry.created  # the earlier day of publication
            entry = entry.model_copy(update=changes)
        return self.model_copy(update={"entries": sorted([*others, entry], key=_order)})

    def text(self) -> str:
        """The index as JSON, sorted so that diffs are small. None is left out, except in copies
        and files, where null means unknown."""
        entries = []
        for entry in sorted(self.entries, key=_order):
            whole = entry.model_dump(include={"copies", "files"})
            entries.append(entry.model_dump(exclude_none=True) | whole)
        content = {**(self.model_extra or {}), "schema": self.schema_, "entries": entries}
        if self.statement is not None:
            content["statement"] = self.statement.model_dump()
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


def listed_as(repo: str) -> str:
    """The name of a repository in its own index: `.` for a folder, which may be moved."""
    return "." if is_folder(repo) else repo


def comparable(entries: Iterable[Entry]) -> list[Entry]:
    """The largest group of a model's entries with the same questions, newest first."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda each: each.created or "", reverse=True):
        if (measured := entry.measured) and entry.decision:
            able = measured.exact.all_tasks and measured.exact.all_tasks.questions
            asked = entry.weights_fingerprint, measured.text.fingerprint, measured.tasks, able
            groups.setdefault(repr(asked), []).append(entry)
    return max(groups.values(), key=len, default=[])


def kept_words(entry: Entry, entries: Iterable[Entry]) -> str:
    """The share of the exact model's right answers that an entry keeps, with its interval, if it
    can be compared with that of the other `entries`."""
    decision = entry.decision
    if decision is None:
        return UNKNOWN
    if entry not in comparable(other for other in entries if other.model == entry.model):
        return "other questions"
    low, high = map(percent, decision.interval or ())
    return f"{percent(decision.kept)} ({low} to {high})"


def parse(text: str | bytes, origin: str) -> Index:
    """Parse an index. Raises `RotationZooError` for anything else and for another schema."""
    hint = "tell its owners, or name another one with --index"
    content = strict_json.parse(text, origin, hint)
    strict_json.check_schema(content, SCHEMA, origin, f"{origin} is not an index", hint)
    return strict_json.validate(Index, content, origin, hint)


def read(path: Path) -> Index:
    """Read the index at a path from the user, which may be a symbolic link. Raises as `parse`."""
    return parse(files.read(Path(os.path.realpath(path)), strict_json.LIMIT), str(path))


def _order(entry: Entry) -> tuple[str, bool, str, str]:
    return entry.model.lower(), entry.format != "rotationzoo", entry.recipe, entry.identity
