"""The signature of a zoo repository's index: checked when the index is read, and made anew when a
push extends it. It is for one repository, ends on a day, and is counted, so that neither another
zoo of the same signer nor an older state passes for it."""

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta

from rotationzoo.errors import RotationZooError
from rotationzoo.storage import files, strict_json
from rotationzoo.storage.files import digest, disk_errors
from rotationzoo.storage.files import replace as replace_file
from rotationzoo.storage.folders import state_folder
from rotationzoo.storage.locks import locked
from rotationzoo.zoo import index
from rotationzoo.zoo.hubs.registry import HUBS, open_hub
from rotationzoo.zoo.index import ROOT_FILES, Index, Statement
from rotationzoo.zoo.lookup import LoadedIndex
from rotationzoo.zoo.signing.make import SigningTool
from rotationzoo.zoo.signing.signature_file import OWNERS_HINT
from rotationzoo.zoo.signing.verify import Demand, Finding, Signed, check_signature

NAME = f"{index.NAME}.sig"
LIFETIME = timedelta(days=180)
"""How long a signature is for the newest index: a zoo may have nothing to publish for months."""
_RENEWAL = LIFETIME / 2
"""A push that changes nothing signs anew if the signature ends within this time."""


@dataclass(frozen=True)
class OwnIndex:
    """The index of a repository as a push reads it, to extend it."""

    hub: str
    repo: str
    content: Index
    data: bytes | None = None
    """The file as it was read. None if there is none."""
    signature: bytes | None = None


def read_own_index(hub_name: str, repo: str, revision: str | None) -> OwnIndex:
    """The index of a repository at a revision, which is None if there is no such repository."""
    hub = open_hub(hub_name)
    data = hub.read(repo, revision, index.NAME) if revision else None
    if data is None:
        return OwnIndex(hub_name, repo, Index())
    content = index.parse(data, f"{index.NAME} of {repo}")
    return OwnIndex(hub_name, repo, content, data, hub.read(repo, revision, NAME))


@dataclass(frozen=True)
class IndexSigner:
    """Signs the index that a push extends."""

    tool: SigningTool
    adopt: bool = False
    """Whether to sign entries that have another signer or none."""

    def sign(self, before: OwnIndex, content: Index) -> tuple[Index, bytes]:
        """The extended index, `content`, with a new statement, and its signature.

        If nothing has changed, and the signature that was there does not end soon, both are what
        was there. Raises `RotationZooError` if the earlier index is not signed by the same signer:
        a signature vouches for every entry, and anyone who controls the repository may have added
        some.
        """
        checks = not self.adopt and bool(before.content.entries)
        earlier = _lasting_signature(before, content) if checks else None
        if checks:
            # First, because a keyless signature is entered in a public log for good.
            self._check(before)
        if earlier is not None and self.tool.signer is not None:
            return content, earlier
        # An unchecked index may have the highest counter that there is.
        last = before.content.statement if checks else None
        signed = content.model_copy(update={"statement": _next_statement(before, last)})
        signature, _ = self.tool.sign({index.NAME: signed.text().encode()}, "index")
        if checks:
            self._check(before)  # now the signer of a keyless signature is known, too
        return (signed, signature) if earlier is None else (content, earlier)

    def check(self, before: OwnIndex) -> None:
        """Raise `RotationZooError` if the earlier index keeps `sign` from signing its extension, as
        far as the signer is known before a signature is made."""
        if not self.adopt and before.content.entries:
            self.tool.identify()
            self._check(before)

    def _check(self, before: OwnIndex) -> None:
        """Check that the earlier index is signed, and by the same signer if that is known."""
        what, signer = f"the index of {before.repo}", self.tool.signer
        signers = () if signer is None else (signer,)
        try:
            if before.signature is None and signer is None:
                raise RotationZooError(f"{what} has no signature")
            demand = Demand(signers, bool(signers), self.tool.trust_config)
            check_signature(_as_signed(what, before.data, before.signature), demand)
            statement = _check_place(before.content, before.hub, before.repo)
            if expired := _say_expired(statement):
                raise RotationZooError(expired)
            if signer is not None:
                # An older state must not become the newest by being signed again.
                _check_newest(statement)
        except RotationZooError as error:
            listed = len(before.content.entries)
            raise RotationZooError(
                f"{error}, and a new signature would vouch for all that it lists",
                hint=f"look at what it lists ({listed:,}), and to sign that too, add: "
                "--adopt-index",
            ) from error


def root_names(signed: bool) -> list[str]:
    """The names of the files that a push writes at the root of a repository."""
    return [*ROOT_FILES, NAME] if signed else list(ROOT_FILES)


def check_unsigned_push(before: OwnIndex) -> None:
    """Raise `RotationZooError` if the index is signed: a push that does not sign it would leave a
    signature that is wrong."""
    if before.signature is not None:
        raise RotationZooError(
            f"the index of {before.repo} is signed, and would no longer be what was signed",
            hint="sign the new one: --sign key.pem, or in CI: --sign keyless",
        )


def check_index(loaded: LoadedIndex, demand: Demand) -> Finding | None:
    """Check the signature of an index that was read from a zoo repository, and that it is for this
    repository and for the newest index.

    None for an index that the user named or that came with the package, and if the user asks for no
    signature. Raises `RotationZooError` for a signature that is wrong whatever the user asks, for
    an older index than was read before if a signer is named, and for a signature that is missing or
    has expired if one is required.
    """
    if loaded.hub is None or loaded.repo is None or loaded.data is None:
        return None
    signature = open_hub(loaded.hub).read(loaded.repo, loaded.revision, NAME)
    what = f"the index of {loaded.repo}"
    is_asked = demand.required or bool(demand.signers)
    if signature is None and not demand.required:
        finding = Finding("unsigned", f"{what} is not signed: only what it lists may be")
        return finding if is_asked else None
    finding = check_signature(_as_signed(what, loaded.data, signature), demand)
    statement = _check_place(loaded.content, loaded.hub, loaded.repo)
    if not is_asked:
        return None
    if expired := _say_expired(statement):
        if demand.required:
            raise RotationZooError(
                f"{expired}: what it lists may not be the newest",
                hint="ask its owners to push with --sign and --adopt-index, which renews it",
            )
        finding = replace(finding, note=f"{finding.note}; {expired}")
    _check_newest(statement)
    return finding


def _as_signed(what: str, data: bytes | None, signature: bytes | None) -> Signed:
    return Signed(what, {index.NAME: digest(data or b"")}, signature)


def _today() -> date:
    return datetime.now(UTC).date()


def _say_expired(statement: Statement) -> str:
    """That the signature of an index has expired, in words; empty if it has not."""
    if _today() <= date.fromisoformat(statement.expires):
        return ""
    return f"the signature of the index of {statement.repo} ended on {statement.expires}"


def _lasting_signature(before: OwnIndex, content: Index) -> bytes | None:
    """The signature of the earlier index if that is the same as `content`, and it does not end
    soon."""
    statement = before.content.statement
    if statement is None or content.text().encode() != before.data:
        return None
    left = date.fromisoformat(statement.expires) - _today()
    return before.signature if left >= _RENEWAL else None


def _next_statement(before: OwnIndex, last: Statement | None) -> Statement:
    """The statement after the `last` one. The counter is the time in milliseconds where that is
    higher: it rises even if the last statement was lost."""
    counter = int(datetime.now(UTC).timestamp() * 1000)
    if last is not None:
        counter = max(counter, last.counter + 1)
    expires = (_today() + LIFETIME).isoformat()
    return Statement(hub=before.hub, repo=before.repo, counter=counter, expires=expires)


def _check_place(content: Index, hub: str, repo: str) -> Statement:
    """The statement of a signed index. Raises `RotationZooError` if it is for another repository,
    or does not say for which."""
    statement = content.statement
    if statement is None:
        raise RotationZooError(
            f"the signature of the index of {repo} does not say which repository it is for",
            hint="ask its owners to push with --sign and --adopt-index",
        )
    if (statement.hub, statement.repo) != (hub, repo):
        signed_for = f"{statement.repo} on {HUBS[statement.hub].title}"
        raise RotationZooError(
            f"the index of {repo} on {HUBS[hub].title} was signed for {signed_for}",
            hint=OWNERS_HINT,
        )
    return statement


def _check_newest(statement: Statement) -> None:
    """Raise `RotationZooError` if a higher counter of this repository was seen on this machine.
    Otherwise remember this one."""
    try:
        path = state_folder() / "indexes.json"
    except RuntimeError as error:
        raise RotationZooError(
            "this user has no home, where the state of the index would be remembered",
            hint="name a folder for it: export XDG_STATE_HOME=/path/to/state",
        ) from error
    lock = path.with_name(f".{path.name}.lock")
    place = f"{statement.hub}/{statement.repo}"
    with disk_errors(path, "set XDG_STATE_HOME"), locked(lock, f"writing {path}"):
        seen: dict[str, int] = {}
        if files.size_of(path) is not None:
            hint = f"look who changed it; to forget what was seen of indexes: rm {path}"
            seen = strict_json.validate(
                dict[str, int], strict_json.read(path, hint), str(path), hint
            )
        if statement.counter < seen.get(place, 0):
            raise RotationZooError(
                f"the index of {statement.repo} is an older one: its counter is "
                f"{statement.counter}, and {seen[place]} was seen before",
                hint=f"{OWNERS_HINT}; if it is meant to be so, remove its line from {path}",
            )
        if statement.counter != seen.get(place):
            replace_file(path, strict_json.text({**seen, place: statement.counter}))
