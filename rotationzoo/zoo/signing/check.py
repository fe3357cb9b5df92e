"""Checking a signature: that it holds, that it is for these very files, and that its signer is one
whom the user accepts.

The format is that of OpenSSF Model Signing: a Sigstore bundle (v0.3) around a DSSE envelope, whose
in-toto statement lists files with their sha256 (https://github.com/ossf/model-signing-spec).
Reading needs no extra; checking needs the libraries of the extra `sign`.

An artifact's signature lies in the folder as `model.sig`. It is for the manifest and the files that
the manifest lists.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AliasPath, BeforeValidator, Field

from rotationzoo.artifact.store import CARD, MANIFEST, SIGNATURE, Artifact
from rotationzoo.errors import RotationZooError, UsageError, first_sentence
from rotationzoo.network import limits
from rotationzoo.storage import files, strict_json
from rotationzoo.storage.files import sha256
from rotationzoo.storage.strict_json import Sha256, Strict
from rotationzoo.zoo.signing.signer import Signer, describe_key, parse_signer

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig

LIMIT = 1 << 20  # bytes; a signature of the demo model's artifact has 5,530, or 1,779 with a key
INSTALL = "pip install 'model-signing>=1.1' 'pyopenssl>=25.3'"
OWNERS_HINT = "do not use it; ask its owners what happened"
_HINT = "fetch it again; if it stays so, tell the owners of the repository"
_TRUST_SECONDS = 30.0  # for half a dozen small files from Sigstore's own repository
# The signature cannot be for itself. The card is prose that is written anew from the manifest.
_UNSIGNED = {CARD, SIGNATURE}
# What the library says of a certificate that is not valid yet, or no longer: it has one type of
# error for everything that is wrong with a certificate.
_OUT_OF_TIME = re.compile("not valid at validation time|has expired|not yet valid")
_ISSUER = "1.3.6.1.4.1.57264.1.1"  # of a certificate of Sigstore, as in Fulcio's oid-info.md


@dataclass(frozen=True)
class Demand:
    """The signatures that a user accepts or requires."""

    signers: tuple[Signer, ...] = ()
    required: bool = False
    """Whether even an index that was read from a hub must be signed."""
    trust_config: Path | None = None
    """A file of keys to trust in place of Sigstore's own."""

    def expected(self, listed: Signer | None, vouched: bool, what: str) -> tuple[Signer, ...]:
        """Who must have signed: the signers that the user named, or else those of the index that
        the user named. Raises `RotationZooError` if one must have signed and none is known."""
        named = self.signers or ((listed,) if listed is not None and vouched else ())
        if self.required and not named:
            hint = "name the signer with --signer: an identity, or the file of a public key"
            raise RotationZooError(f"it is not known who should have signed {what}", hint)
        return named


def make_demand(
    signers: str | Sequence[str] | None = None,
    issuer: str | None = None,
    require_signature: bool = False,
    trust_config: str | Path | None = None,
) -> Demand:
    """The demand of a command's or a function's options. Raises `UsageError` for options that
    contradict each other, and `RotationZooError` if a demand cannot be met without the extra."""
    # One signer is one name, and not its letters.
    named = [signers] if isinstance(signers, str) else signers or ()
    if issuer is not None and not named:
        raise UsageError(
            "--issuer needs a --signer that it vouches for", hint="add: --signer IDENTITY"
        )
    if named or require_signature:
        check_installed("checking a signature")
    parsed = tuple(parse_signer(name, issuer) for name in named)
    return Demand(parsed, require_signature, None if trust_config is None else Path(trust_config))


def is_installed() -> bool:
    """Whether the extra `sign` is installed."""
    return find_spec("model_signing") is not None


def check_installed(what: str, otherwise: str = "") -> None:
    """Raise `RotationZooError` if the extra `sign` is missing, which `what` needs. `otherwise` ends
    the hint with a way to do without."""
    if not is_installed():
        raise RotationZooError(f"{what} needs the extra `sign`", hint=f"run: {INSTALL}{otherwise}")


@dataclass(frozen=True)
class Signed:
    """Something that may be signed: an artifact's folder, or an index."""

    what: str
    hashes: Mapping[str, str]
    """Name -> sha256 of each file that it has now; the signature has to be for `signed_part`."""
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
    signer: Signer | None = None

    def summary(self) -> dict[str, Any]:
        """The same as JSON: the state, and the signer's fields that are known."""
        signer = self.signer.model_dump(exclude_none=True) if self.signer else None
        return {"state": self.state, "signer": signer}


def _decode(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("it is no text in base64")
    return base64.b64decode(text, validate=True)


def _at(first: str, *path: str | int) -> Any:
    return Field(validation_alias=AliasPath(first, *path))


_Base64 = Annotated[bytes, BeforeValidator(_decode)]
_InToto = Literal["application/vnd.in-toto+json"]


class Bundle(Strict):
    """A signature file and what it claims."""

    payload: Annotated[_Base64, _at("dsseEnvelope", "payload")]
    """The signed statement."""
    payload_type: Annotated[_InToto, _at("dsseEnvelope", "payloadType")]
    signature: Annotated[_Base64, _at("dsseEnvelope", "signatures", 0, "sig")]
    second: Annotated[None, _at("dsseEnvelope", "signatures", 1)] = None
    certificate: Annotated[
        _Base64 | None, _at("verificationMaterial", "certificate", "rawBytes")
    ] = None
    """The signer's certificate, in DER; None if it was made with a key of the signer's own."""
    key_sha256: Annotated[Sha256 | None, _at("verificationMaterial", "publicKey", "hint")] = None
    """The sha256 of the signer's public key in PEM; None if there is a certificate."""
    files: dict[str, str] = Field(default_factory=dict)
    """Name -> sha256 of the files that it is for, read from the statement."""


class _Resource(Strict):
    name: str
    algorithm: Literal["sha256"]
    digest: Sha256


class _Statement(Strict):
    """The in-toto statement of the predicate type that Model Signing 1.0 defines."""

    type_: Annotated[Literal["https://in-toto.io/Statement/v1"], _at("_type")]
    predicate_type: Annotated[Literal["https://model_signing/signature/v1.0"], _at("predicateType")]
    resources: Annotated[list[_Resource], _at("predicate", "resources")]


def parse_bundle(data: bytes, origin: str) -> Bundle:
    """A signature file. Raises `RotationZooError`, naming `origin`, if it is none."""
    if len(data) > LIMIT:
        raise RotationZooError(
            f"{origin} has {len(data):,} bytes, and no signature has more than {LIMIT:,}",
            hint=_HINT,
        )
    bundle = strict_json.validate(Bundle, strict_json.parse(data, origin, _HINT), origin, _HINT)
    parsed = strict_json.parse(bundle.payload, origin, _HINT)
    resources = strict_json.validate(_Statement, parsed, origin, _HINT).resources
    listed = {resource.name: resource.digest for resource in resources}
    has_one = (bundle.certificate is None) != (bundle.key_sha256 is None)
    if len(listed) != len(resources) or not has_one:
        raise RotationZooError(f"{origin} is damaged: it is no signature of files", hint=_HINT)
    return bundle.model_copy(update={"files": listed})


def claimed_signer(bundle: Bundle, what: str) -> Signer | None:
    """The identity and the issuer in the certificate, not verified yet; None if there is none.
    Raises `RotationZooError`, naming `what` is signed, if it does not have one of each."""
    if bundle.certificate is None:
        return None
    from cryptography import x509

    try:
        extensions = x509.load_der_x509_certificate(bundle.certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identities = names.get_values_for_type(x509.UniformResourceIdentifier)
        identities += names.get_values_for_type(x509.RFC822Name)
        issuer = extensions.get_extension_for_oid(x509.ObjectIdentifier(_ISSUER)).value
        (identity,) = identities
        return Signer(identity=identity, issuer=issuer.public_bytes().decode())
    # A hostile certificate raises errors of many types, which have no common one.
    except Exception as error:
        raise RotationZooError(
            f"the signature of {what} has no certificate that names its signer", hint=OWNERS_HINT
        ) from error


def check_signature(signed: Signed, demand: Demand) -> Finding:
    """Check a signature. Raises `RotationZooError` for one that is wrong in any way, and where one
    is required or its signer named, also for one that is missing or cannot be checked."""
    what, listed = signed.what, signed.listed
    expected = demand.expected(listed, signed.vouched, what)
    candidates = expected or (() if listed is None else (listed,))
    if signed.signature is None:
        if candidates:
            raise RotationZooError(
                f"{what} has no signature, and should have one by {candidates[0]}",
                hint="do not use it unless its owners say why it is not signed",
            )
        return Finding("unsigned", f"{what} is not signed: nothing shows who made it")
    bundle = parse_bundle(signed.signature, f"the signature of {what}")
    differing = dict(signed_part(signed.hashes).items() ^ bundle.files.items())
    if differing:
        raise RotationZooError(
            f"the signature of {what} is for other files: {min(differing)} differs",
            hint=OWNERS_HINT,
        )
    if not is_installed():
        lacking = f"{what} is signed, but the signature was not checked"
        if expected:
            raise RotationZooError(f"{lacking}: the extra `sign` is missing", INSTALL)
        return Finding("unchecked", f"{lacking}; to check it, run: {INSTALL}")
    signer = _choose_signer(bundle, candidates, what)
    if signer is None:
        key = describe_key(bundle.key_sha256 or "")
        note = f"{what} is signed with {key}, which was not checked: add --signer KEY.pem"
        return Finding("unchecked", note)
    if signer.public_key is not None:
        _verify_key(bundle, signer.public_key, what)
    else:
        try:
            trust = _load_trust(demand.trust_config)
        except RotationZooError as error:
            if expected:
                raise
            return Finding("unchecked", f"{what} is signed, but was not checked: {error}")
        _verify_identity(signed.signature, bundle.payload, signer, trust, what)
    more = "" if expected else "; to accept no other, add --signer"
    return Finding("signed", f"{what} is signed by {signer}{more}", signer)


def _choose_signer(bundle: Bundle, candidates: tuple[Signer, ...], what: str) -> Signer | None:
    """The one of the candidates that the signature claims as its signer, or without candidates the
    claimed signer itself. None for an unknown key."""
    claimed = claimed_signer(bundle, what)
    if not candidates:
        return claimed
    for candidate in candidates:
        if candidate == claimed or (claimed is None and candidate.key_sha256 == bundle.key_sha256):
            return candidate
    actual = claimed or describe_key(bundle.key_sha256 or "")
    wanted = " or ".join(map(str, candidates))
    hint = "do not use it; or if you trust that signer too, name it with --signer"
    raise RotationZooError(f"{what} is signed by {actual}, not by {wanted}", hint)


def _load_trust(path: Path | None) -> "ClientTrustConfig":
    """The keys in a file of the user's own (a `ClientTrustConfig` in JSON), or those of Sigstore,
    which are updated through the network (TUF), or with `HF_HUB_OFFLINE` read as they were last
    seen. Raises `RotationZooError`."""
    from huggingface_hub import constants
    from sigstore.models import ClientTrustConfig

    problem = "Sigstore's keys cannot be fetched"
    hint = "check the network, or name a file of keys with --trust-config"
    fetch = partial(ClientTrustConfig.production, constants.HF_HUB_OFFLINE)
    try:
        if path is None:
            return limits.call_within(_TRUST_SECONDS, fetch, "Sigstore")
        problem, hint = f"{path} cannot be read as a trust configuration", "check the file"
        return ClientTrustConfig.from_json(path.read_text(encoding="utf-8"))
    except Exception as error:  # the libraries have no common type of error
        raise RotationZooError(f"{problem}: {first_sentence(error)}", hint=hint) from error


def _verify_identity(
    data: bytes, payload: bytes, signer: Signer, trust: "ClientTrustConfig", what: str
) -> None:
    from sigstore.errors import CertValidationError
    from sigstore.models import Bundle as SigstoreBundle
    from sigstore.verify import Verifier
    from sigstore.verify.policy import Identity

    try:
        policy = Identity(identity=signer.identity or "", issuer=signer.issuer)
        verifier = Verifier(trusted_root=trust.trusted_root)
        _, verified = verifier.verify_dsse(SigstoreBundle.from_json(data), policy)
    except CertValidationError as error:
        reason = f"no authority that is trusted gave {signer} its certificate"
        if _OUT_OF_TIME.search(str(error)):
            reason = f"the certificate of {signer} was not valid at the time of signing"
        raise _wrong(what, reason) from error
    except Exception as error:  # as above
        raise _wrong(what, first_sentence(error)) from error
    # A file may be read in two ways by two parsers: what was verified must be what was compared.
    if verified != payload:
        raise _wrong(what, "it signs something else")


def _verify_key(bundle: Bundle, public_key: str, what: str) -> None:
    """Verify the ECDSA signature of the DSSE envelope, with the hash that belongs to the curve."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    by_size = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    kind = bundle.payload_type.encode()
    # The pre-authentication encoding of https://github.com/secure-systems-lab/dsse (protocol.md).
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(bundle.payload), bundle.payload)
    try:
        key = serialization.load_pem_public_key(public_key.encode())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(bundle.signature, message, ec.ECDSA(by_size[key.curve.key_size]))
    except InvalidSignature as error:
        raise _wrong(what, "it was not made with that key") from error
    except Exception as error:  # as above: an index may list any text as a key
        raise _wrong(what, f"the listed key is none ({first_sentence(error)})") from error


def _wrong(what: str, reason: str) -> RotationZooError:
    return RotationZooError(f"the signature of {what} does not hold: {reason}", hint=OWNERS_HINT)


def signed_part(named: Mapping[str, str]) -> dict[str, str]:
    """Of the files of an artifact (name -> sha256), those that its signature is for."""
    return {name: digest for name, digest in named.items() if name not in _UNSIGNED}


def read_signature(folder: Path) -> bytes | None:
    """The signature in an artifact's folder; None if it has none. Raises `RotationZooError`."""
    path = folder / SIGNATURE
    return None if files.size_of(path) is None else files.read(path, LIMIT)


def check_artifact(artifact: Artifact, demand: Demand) -> Finding:
    """Check the signature in the folder of an artifact, with no index. Raises as
    `check_signature`."""
    folder = artifact.folder
    hashes = {MANIFEST: sha256(files.regular_file(folder, MANIFEST))}
    for name in artifact.manifest.files:
        if name not in artifact.hashes:
            artifact.hashes[name] = sha256(files.regular_file(folder, name))
        hashes[name] = artifact.hashes[name]
    return check_signature(Signed(str(folder), hashes, read_signature(folder)), demand)
