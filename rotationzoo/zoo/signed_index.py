"""The signature of a zoo repository's index. It names the repository, counts up and expires, so
that neither an older index nor one for another repository of the same signer is accepted."""

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta

from rotationzoo.errors import RotationZooError
from rotationzoo.storage import files, folders, strict_json
from rotationzoo.storage.files import disk_errors
from rotationzoo.words import counted
from rotationzoo.zoo import index
from rotationzoo.zoo import signing as signatures
from rotationzoo.zoo.hubs.protocol import HUBS, open_hub
from rotationzoo.zoo.index import ROOT_FILES, Index, Statement
from rotationzoo.zoo.lookup import LoadedIndex, read_index
from rotationzoo.zoo.signing import Demand, Finding, SigningTool

NAME = f"{index.NAME}.sig"
LIFETIME = timedelta(days=180)  # of a signature; a zoo may have nothing to publish for months


def read_own_index(hub_name: str, repo: str) -> LoadedIndex:
    """The newest index of a repository, maybe empty, with its signature. Raises `HubError`."""
    return _with_signature(read_index(repo, hub_name, must_exist=False))


def _with_signature(loaded: LoadedIndex) -> LoadedIndex:
    if loaded.data is None:
        return loaded
    hub = open_hub(str(loaded.hub))
    return replace(loaded, signature=hub.read(str(loaded.repo), loaded.revision, NAME))


@dataclass(frozen=True)
class IndexSigner:
    """Signs the index that a push extends. `adopt`: even entries of another signer, or none."""

    tool: SigningTool
    adopt: bool = False

    def sign(self, before: LoadedIndex, content: Index) -> tuple[Index, bytes]:
        """The extended index with a new statement, and its signature. Raises as `check`."""
        # Before signing: a public log keeps keyless signatures forever.
        self.check(before)
        # At least the time in milliseconds, so that it rises even if the last statement was lost.
        counter = int(datetime.now(UTC).timestamp() * 1000)
        last = before.content.statement
        # An unchecked index may have any counter.
        if last is not None and before.content.entries and not self.adopt:
            counter = max(counter, last.counter + 1)
        expires = (_today() + LIFETIME).isoformat()
        place = {"hub": str(before.hub), "repo": str(before.repo)}
        statement = Statement(**place, counter=counter, expires=expires)
        signed = content.model_copy(update={"statement": statement})
        signature, _ = self.tool.sign({index.NAME: signed.text().encode()}, "index")
        self.check(before)  # now that the signer of a keyless signature is known
        return signed, signature

    def check(self, before: LoadedIndex) -> None:
        """Raise `RotationZooError` if the earlier index has entries without a signature, or by
        another signer: a new one vouches for all entries, and anyone may have added some."""
        if self.adopt or not before.content.entries:
            return
        signers = () if self.tool.signer is None else (self.tool.signer,)
        try:
            if before.signature is None:
                raise RotationZooError(f"the index of {before.repo} has no signature")
            # An expired or older index must not be signed again.
            _check(before, Demand(signers, bool(signers), self.tool.trust_config), may_end=False)
        except RotationZooError as error:
            problem = f"{error}, and a new signature would vouch for all of its entries"
            review = f"review its {counted(len(before.content.entries), 'artifact')}"
            hint = f"{review}, and to sign the index with all of them, add: --adopt-index"
            raise RotationZooError(problem, hint) from error


def root_names(signed: bool) -> list[str]:
    """The files that a push writes to the root of a repository."""
    return [*ROOT_FILES, NAME] if signed else list(ROOT_FILES)


def check_index(loaded: LoadedIndex, demand: Demand) -> Finding | None:
    """Check the signature of an index from a zoo repository. None for other indexes, and if the
    user demands nothing. Raises `RotationZooError` for a wrong signature; if a signer is named, for
    an index older than one that was seen; if one is required, for a missing or expired one."""
    if loaded.hub is None or loaded.repo is None:
        return None
    own = _with_signature(loaded)
    if own.signature is None and not demand.required:
        note = f"the index of {loaded.repo} is not signed, although its artifacts may be"
        finding = Finding("unsigned", note)
    else:
        finding = _check(own, demand, may_end=not demand.required)
    return finding if demand.required or demand.signers else None


def _check(own: LoadedIndex, demand: Demand, may_end: bool) -> Finding:
    """Check a signature, its repository, its last day unless it `may_end`, and if a signer is
    named, that this machine has not seen a newer one."""
    what, statement = f"the index of {own.repo}", own.content.statement
    signed = signatures.Signed(what, {index.NAME: own.data or b""}, own.signature)
    finding = signatures.check_signature(signed, demand)
    if statement is None:
        problem = f"the signature of {what} does not say which repository it is for"
        raise RotationZooError(problem, "ask its owners to push with --sign and --adopt-index")
    if (statement.hub, statement.repo) != (own.hub, own.repo):
        signed_for = f"{statement.repo} on {HUBS[statement.hub].title}"
        problem = f"{what} on {HUBS[str(own.hub)].title} was signed for {signed_for}"
        raise RotationZooError(problem, signatures.OWNERS_HINT)
    if _today() > date.fromisoformat(statement.expires):
        expired = f"the signature of {what} expired on {statement.expires}"
        if not may_end:
            hint = "ask its owners to push with --sign and --adopt-index, which renews it"
            raise RotationZooError(f"{expired}: there may be a newer index", hint)
        finding = replace(finding, note=f"{finding.note}; {expired}")
    if demand.signers:
        _check_newest(statement)
    return finding


def _today() -> date:
    return datetime.now(UTC).date()


def _check_newest(statement: Statement) -> None:
    """Raise `RotationZooError` if this machine has seen a higher counter; else remember it."""
    try:
        path = folders.state_folder() / "indexes.json"
    except RuntimeError as error:
        problem = "this user has no home directory for the counters of indexes"
        hint = "name another folder: export XDG_STATE_HOME=/path/to/state"
        raise RotationZooError(problem, hint) from error
    lock = folders.sibling(path, "lock")
    place = f"{statement.hub}/{statement.repo}"
    with disk_errors(path, "set XDG_STATE_HOME"), folders.locked(lock, f"writing {path}"):
        seen: dict[str, int] = {}
        if files.size_of(path) is not None:
            hint = f"check who changed it; to forget all indexes: rm {path}"
            content = strict_json.read(path, hint)
            seen = strict_json.validate(dict[str, int], content, str(path), hint)
        if statement.counter < seen.get(place, 0):
            older = f"the index of {statement.repo} is an older one: its counter is"
            hint = f"{signatures.OWNERS_HINT}; if this is intended, remove its line from {path}"
            counters = f"{statement.counter}, and {seen[place]} was seen before"
            raise RotationZooError(f"{older} {counters}", hint)
        if statement.counter != seen.get(place):
            folders.replace_file(path, strict_json.text({**seen, place: statement.counter}))
