"""Checking a signature: that it holds, that it is for these very files, and that its signer is one
whom the user accepts.

An artifact's signature lies in the folder as `model.sig`. It is for the manifest and the files that
the manifest lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from rotationzoo.artifact.store import CARD, MANIFEST, SIGNATURE, Artifact
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.storage import files
from rotationzoo.storage.files import sha256
from rotationzoo.zoo.signing import signature_file
from rotationzoo.zoo.signing.signature_file import (
    LIMIT,
    OWNERS_HINT,
    Bundle,
    check_installed,
    claimed_signer,
    parse_bundle,
    verify_bundle,
)
from rotationzoo.zoo.signing.signer import Signer, describe_key, parse_signer


@dataclass(frozen=True)
class Demand:
    """The signatures that a user accepts or requires."""

    signers: tuple[Signer, ...] = ()
    """Whose signature is accepted. Empty if the user named no one."""
    required: bool = False
    """Whether even an index that was read from a hub must be signed."""
    trust_config: Path | None = None
    """A file of keys to trust in place of Sigstore's own."""


class SignatureOptions(TypedDict, total=False):
    """Options on signatures. Without any of these, a signature is checked if there is one."""

    signers: Sequence[str]
    """Who may have signed: identities, or files of public keys (`.pem`)."""
    issuer: str | None
    """Who vouches for the identities; not needed for workflows of GitHub."""
    require_signature: bool
    """Refuse what is not signed, the index of the repository included."""
    trust_config: Path | None
    """A file with the keys of another Sigstore than the public one."""


def make_demand(**options: Unpack[SignatureOptions]) -> Demand:
    """The demand of a command's or a function's options. Raises `UsageError` for options that
    contradict each other, and `RotationZooError` if a demand cannot be met without the extra."""
    named, issuer = options.get("signers", ()), options.get("issuer")
    if isinstance(named, str):  # one signer, and not its letters
        named = [named]
    required = options.get("require_signature", False)
    if issuer is not None and not named:
        raise UsageError(
            "--issuer needs a --signer that it vouches for", hint="add: --signer IDENTITY"
        )
    if named or required:
        check_installed("checking a signature")
    signers = tuple(parse_signer(name, issuer) for name in named)
    return Demand(signers, required, options.get("trust_config"))


@dataclass(frozen=True)
class Signed:
    """Something that may be signed: an artifact's folder, or an index."""

    what: str
    """It in words."""
    hashes: Mapping[str, str]
    """Name -> sha256 of each file that the signature has to be for, as it is now."""
    signature: bytes | None
    listed: Signer | None = None
    """Who signed it, as an index says."""
    vouched: bool = False
    """Whether the user named that index, so that it does not come with what it lists."""


@dataclass(frozen=True)
class Finding:
    """The findings on a signature that was not refused."""

    state: Literal["unsigned", "unchecked", "signed"]
    note: str
    """One sentence for people."""
    signer: Signer | None = None

    def summary(self) -> dict[str, Any]:
        """The same as JSON: the state, and the signer's fields that are known."""
        signer = self.signer.model_dump(exclude_none=True) if self.signer else None
        return {"state": self.state, "signer": signer}


def expected_signers(
    demand: Demand, listed: Signer | None, vouched: bool, what: str
) -> tuple[Signer, ...]:
    """Who must have signed: whom the user named, or else the index that the user named.

    Empty if no signer is named. Raises `RotationZooError` if a signature is required anyway: a
    signature of just anybody proves nothing.
    """
    if demand.signers:
        return demand.signers
    if listed is not None and vouched:
        return (listed,)
    if demand.required:
        raise RotationZooError(
            f"it is not known who should have signed {what}",
            hint="name the signer with --signer: an identity, or the file of a public key",
        )
    return ()


def check_signature(signed: Signed, demand: Demand) -> Finding:
    """Check a signature, and say what is known of it.

    Raises `RotationZooError` for a signature that is wrong in any way, and where one is required or
    its signer named, also for one that is missing or cannot be checked.
    """
    expected = expected_signers(demand, signed.listed, signed.vouched, signed.what)
    if signed.signature is None:
        return _unsigned(signed, expected)
    bundle = parse_bundle(signed.signature, f"the signature of {signed.what}")
    _check_files(bundle, signed)
    if not signature_file.is_installed():
        lacking = f"{signed.what} is signed, but the signature was not checked"
        if expected:
            raise RotationZooError(
                f"{lacking}: the extra `sign` is missing", signature_file.INSTALL
            )
        return Finding("unchecked", f"{lacking}; to check it, run: {signature_file.INSTALL}")
    candidates = expected or (() if signed.listed is None else (signed.listed,))
    signer = _choose_signer(bundle, candidates, signed.what)
    if signer is None:
        key = describe_key(bundle.key_sha256 or "")
        note = f"{signed.what} is signed with {key}, which was not checked: add --signer KEY.pem"
        return Finding("unchecked", note)
    try:
        verify_bundle(bundle, signer, signed.what, demand.trust_config)
    except signature_file.NoTrust as error:
        if expected:
            raise
        return Finding("unchecked", f"{signed.what} is signed, but was not checked: {error}")
    if expected:
        return Finding("signed", f"{signed.what} is signed by {signer}", signer)
    note = f"{signed.what} is signed by {signer}; to accept no other, add --signer"
    return Finding("signed", note, signer)


def _unsigned(signed: Signed, expected: tuple[Signer, ...]) -> Finding:
    if expected or signed.listed is not None:
        signer = (*expected, signed.listed)[0]
        raise RotationZooError(
            f"{signed.what} has no signature, and should have one by {signer}",
            hint="do not use it unless its owners say why it is not signed",
        )
    return Finding("unsigned", f"{signed.what} is not signed: nothing shows who made it")


def _check_files(bundle: Bundle, signed: Signed) -> None:
    """Raise `RotationZooError` unless the signature lists these files, and no other content."""
    for name in sorted(signed.hashes.keys() | bundle.files.keys()):
        if signed.hashes.get(name) != bundle.files.get(name):
            raise RotationZooError(
                f"the signature of {signed.what} is for other files: {name} differs",
                hint=OWNERS_HINT,
            )


def _choose_signer(bundle: Bundle, candidates: tuple[Signer, ...], what: str) -> Signer | None:
    """The one of the candidates that the signature claims as its signer, or without candidates the
    claimed signer itself. None for an unknown key."""
    claimed: Signer | None = None
    if bundle.certificate is not None:
        claimed = claimed_signer(bundle.certificate, what)
    if not candidates:
        return claimed
    for candidate in candidates:
        if candidate == claimed or (claimed is None and candidate.key_sha256 == bundle.key_sha256):
            return candidate
    actual = claimed or describe_key(bundle.key_sha256 or "")
    wanted = " or ".join(map(str, candidates))
    raise RotationZooError(
        f"{what} is signed by {actual}, not by {wanted}",
        hint="do not use it; or if you trust that signer too, name it with --signer",
    )


# The signature cannot be for itself. The card is prose that is written anew from the manifest.
_UNSIGNED = {CARD, SIGNATURE}


def signed_part(named: Mapping[str, str]) -> dict[str, str]:
    """Of the files of an artifact (name -> sha256), those that its signature is for."""
    return {name: digest for name, digest in named.items() if name not in _UNSIGNED}


def read_signature(folder: Path) -> bytes | None:
    """The signature in an artifact's folder; None if it has none. Raises `RotationZooError`."""
    path = folder / SIGNATURE
    if files.size_of(path) is None:
        return None
    return files.read(path, LIMIT)


def check_artifact(artifact: Artifact, demand: Demand) -> Finding:
    """Check the signature in the folder of an artifact, on this machine and with no index.

    Raises as `check_signature`.
    """
    folder = artifact.folder
    hashes = {MANIFEST: sha256(files.regular_file(folder, MANIFEST))}
    for name in artifact.manifest.files:
        if name not in artifact.hashes:
            artifact.hashes[name] = sha256(files.regular_file(folder, name))
        hashes[name] = artifact.hashes[name]
    signed = Signed(str(folder), signed_part(hashes), read_signature(folder))
    return check_signature(signed, demand)


def check_files(signed: Signed, folder: Path, demand: Demand) -> Finding:
    """Check the signature of an artifact's files in `folder`, whose hashes are in `signed`.

    The signature is read only where an index lists it, because another one is of no entry. Raises
    as `check_signature`.
    """
    signature = read_signature(folder) if SIGNATURE in signed.hashes else None
    part = replace(signed, hashes=signed_part(signed.hashes), signature=signature)
    return check_signature(part, demand)
