"""Checking a signature: that it holds, that it is for these very files, and who made it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rotationzoo.errors import RotationZooError
from rotationzoo.zoo.signing import extra
from rotationzoo.zoo.signing.bundle import Bundle, parse_bundle
from rotationzoo.zoo.signing.demand import Demand
from rotationzoo.zoo.signing.signer import Signer, describe_key
from rotationzoo.zoo.signing.verifier import OWNERS_HINT, claimed_signer, verify_bundle


@dataclass(frozen=True)
class Signed:
    """Something that may be signed: an artifact's folder, or an index."""

    what: str
    """What it is, in words."""
    hashes: Mapping[str, str]
    """Name -> sha256 of each file that the signature has to be for, as it is now."""
    signature: bytes | None
    listed: Signer | None = None
    """Who signed it, as an index says."""
    vouched: bool = False
    """Whether the user named that index, so that it does not come with what it lists."""


@dataclass(frozen=True)
class Finding:
    """What is known of a signature that was not refused."""

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

    Empty if nobody has been named. Raises `RotationZooError` if a signature is required anyway: a
    signature of just anybody proves nothing.
    """
    if demand.signers:
        return demand.signers
    if listed is not None and vouched:
        return (listed,)
    if demand.required:
        raise RotationZooError(
            f"nobody has said who should have signed {what}",
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
    if not extra.is_installed():
        lacking = f"{signed.what} is signed, but the signature was not checked"
        if expected:
            raise RotationZooError(f"{lacking}: the extra `sign` is missing", extra.INSTALL)
        return Finding("unchecked", f"{lacking}; to check it, run: {extra.INSTALL}")
    candidates = expected or (() if signed.listed is None else (signed.listed,))
    signer = _choose_signer(bundle, candidates, signed.what)
    if signer is None:
        key = describe_key(bundle.key_sha256 or "")
        note = f"{signed.what} is signed with {key}, which was not checked: add --signer KEY.pem"
        return Finding("unchecked", note)
    try:
        verify_bundle(bundle, signer, signed.what, demand.trust_config)
    except extra.NoTrust as error:
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
    claimed signer itself. None for a key that nobody knows."""
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
