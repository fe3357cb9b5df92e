"""The signature of a zoo repository's index: checked when the index is read, and made anew when a
push extends it."""

from dataclasses import dataclass

from rotationzoo.errors import RotationZooError
from rotationzoo.storage.files import digest
from rotationzoo.zoo import index
from rotationzoo.zoo.hubs.protocol import Hub
from rotationzoo.zoo.hubs.registry import open_hub
from rotationzoo.zoo.index import Index
from rotationzoo.zoo.lookup import LoadedIndex
from rotationzoo.zoo.repository_files import ROOT_FILES
from rotationzoo.zoo.signing.check import Finding, Signed, check_signature
from rotationzoo.zoo.signing.demand import Demand
from rotationzoo.zoo.signing.make import SigningTool

NAME = f"{index.NAME}.sig"


@dataclass(frozen=True)
class OwnIndex:
    """The index of a repository as a push reads it, to extend it."""

    content: Index
    data: bytes | None = None
    """The file as it was read. None if there is none."""
    signature: bytes | None = None


def read_own_index(hub: Hub, repo: str, revision: str | None) -> OwnIndex:
    """The index of a repository at a revision, which is None if there is no such repository."""
    data = hub.read(repo, revision, index.NAME) if revision else None
    if data is None:
        return OwnIndex(Index())
    content = index.parse(data, f"{index.NAME} of {repo}")
    return OwnIndex(content, data, hub.read(repo, revision, NAME))


@dataclass(frozen=True)
class IndexSigner:
    """Signs the index that a push extends."""

    tool: SigningTool
    adopt: bool = False
    """Whether to sign entries that somebody else has signed, or nobody."""

    def sign(self, before: OwnIndex, data: bytes, repo: str) -> bytes:
        """The signature of the extended index, `data`.

        If nothing has changed, it is the signature that was there. Raises `RotationZooError` if the
        earlier index is not signed by the same signer: a signature vouches for every entry, and
        whoever controls the repository may have added some.
        """
        checks = not self.adopt and bool(before.content.entries)
        earlier = before.signature if checks and data == before.data else None
        if checks:
            # First, because a keyless signature is entered in a public log for good.
            self._check(before, repo)
        if earlier is not None and self.tool.signer is not None:
            return earlier
        signature, _ = self.tool.sign({index.NAME: data}, "index")
        if checks:
            self._check(before, repo)  # now the signer of a keyless signature is known, too
        return earlier or signature

    def check(self, before: OwnIndex, repo: str) -> None:
        """Raise `RotationZooError` if the earlier index keeps `sign` from signing its extension, as
        far as the signer is known before a signature is made."""
        if not self.adopt and before.content.entries:
            self.tool.identify()
            self._check(before, repo)

    def _check(self, before: OwnIndex, repo: str) -> None:
        """Check that the earlier index is signed, and by the same signer if that is known."""
        what, signer = f"the index of {repo}", self.tool.signer
        signers = () if signer is None else (signer,)
        try:
            if before.signature is None and signer is None:
                raise RotationZooError(f"{what} has no signature")
            demand = Demand(signers, bool(signers), self.tool.trust_config)
            check_signature(_as_signed(what, before.data, before.signature), demand)
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


def check_unsigned_push(before: OwnIndex, repo: str) -> None:
    """Raise `RotationZooError` if the index is signed: a push that does not sign it would leave a
    signature that is wrong."""
    if before.signature is not None:
        raise RotationZooError(
            f"the index of {repo} is signed, and would no longer be what was signed",
            hint="sign the new one: --sign key.pem, or in CI: --sign keyless",
        )


def check_index(loaded: LoadedIndex, demand: Demand) -> Finding | None:
    """Check the signature of an index that was read from a zoo repository.

    None for an index that the user named or that came with the package, and if the user asks for no
    signature. Raises `RotationZooError` for a signature that is wrong whatever the user asks, and
    for a missing one if it is required.
    """
    if loaded.hub is None or loaded.repo is None or loaded.data is None:
        return None
    signature = open_hub(loaded.hub).read(loaded.repo, loaded.revision, NAME)
    what = f"the index of {loaded.repo}"
    is_asked = demand.required or bool(demand.signers)
    if signature is None and not demand.required:
        finding = Finding("unsigned", f"{what} is not signed: only what it lists may be")
    else:
        finding = check_signature(_as_signed(what, loaded.data, signature), demand)
    return finding if is_asked else None


def _as_signed(what: str, data: bytes | None, signature: bytes | None) -> Signed:
    return Signed(what, {index.NAME: digest(data or b"")}, signature)
