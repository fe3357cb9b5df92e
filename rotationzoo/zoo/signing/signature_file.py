"""A signature file: reading what it claims, and checking whether it holds and whom its certificate
names.

The format is that of OpenSSF Model Signing: a Sigstore bundle (v0.3) around a DSSE envelope, whose
in-toto statement lists files with their sha256 (https://github.com/ossf/model-signing-spec).
Reading needs no extra; checking needs the libraries of the extra `sign`.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.network import limits
from rotationzoo.storage import strict_json
from rotationzoo.storage.strict_json import Sha256, Strict
from rotationzoo.zoo.signing.signer import Signer

PAYLOAD_TYPE = "application/vnd.in-toto+json"
LIMIT = 1 << 20  # bytes; a signature of the demo model's artifact has 5,530, or 1,779 with a key
_HINT = "fetch it again; if it stays so, tell the owners of the repository"


class _Resource(Strict):
    name: str
    algorithm: Literal["sha256"]
    digest: Sha256


class _Predicate(Strict):
    resources: list[_Resource]


class _Statement(Strict):
    """The in-toto statement of the predicate type that Model Signing 1.0 defines."""

    type_: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    predicate_type: Annotated[
        Literal["https://model_signing/signature/v1.0"], Field(alias="predicateType")
    ]
    predicate: _Predicate


class _Signature(Strict):
    sig: str


class _Envelope(Strict):
    payload: str
    payload_type: Annotated[Literal["application/vnd.in-toto+json"], Field(alias="payloadType")]
    signatures: Annotated[list[_Signature], Field(min_length=1, max_length=1)]


class _Certificate(Strict):
    raw_bytes: Annotated[str, Field(alias="rawBytes")]


class _Key(Strict):
    hint: Sha256


class _Material(Strict):
    certificate: _Certificate | None = None
    public_key: Annotated[_Key | None, Field(alias="publicKey")] = None


class _Content(Strict):
    material: Annotated[_Material, Field(alias="verificationMaterial")]
    envelope: Annotated[_Envelope, Field(alias="dsseEnvelope")]


@dataclass(frozen=True)
class Bundle:
    """A signature file and what it claims."""

    data: bytes
    files: dict[str, str]
    """Name -> sha256 of the files that it is for."""
    payload: bytes
    """The signed statement, from which `files` was read."""
    signature: bytes
    certificate: bytes | None
    """The signer's certificate, in DER; None if it was made with a key of the signer's own."""
    key_sha256: str | None
    """The sha256 of the signer's public key in PEM; None if there is a certificate."""


def parse_bundle(data: bytes, origin: str) -> Bundle:
    """Read a signature file. Raises `RotationZooError`, naming `origin`, if it is none."""
    if len(data) > LIMIT:
        raise RotationZooError(
            f"{origin} has {len(data):,} bytes, and no signature has more than {LIMIT:,}",
            hint=_HINT,
        )
    content = strict_json.validate(_Content, strict_json.parse(data, origin, _HINT), origin, _HINT)
    payload = _decode(content.envelope.payload, origin)
    parsed = strict_json.parse(payload, origin, _HINT)
    statement = strict_json.validate(_Statement, parsed, origin, _HINT)
    resources = statement.predicate.resources
    listed = {resource.name: resource.digest for resource in resources}
    material = content.material
    has_one = (material.certificate is None) != (material.public_key is None)
    if len(listed) != len(resources) or not has_one:
        raise RotationZooError(f"{origin} is damaged: it is no signature of files", hint=_HINT)
    certificate = None
    if material.certificate is not None:
        certificate = _decode(material.certificate.raw_bytes, origin)
    key_sha256 = material.public_key.hint if material.public_key else None
    signature = _decode(content.envelope.signatures[0].sig, origin)
    return Bundle(data, listed, payload, signature, certificate, key_sha256)


def _decode(text: str, origin: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RotationZooError(f"{origin} is damaged: it is no base64", hint=_HINT) from error


if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig

INSTALL = "pip install 'model-signing>=1.1' 'pyopenssl>=25.3'"
_TRUST_SECONDS = 30.0  # for half a dozen small files from Sigstore's own repository


class NoTrust(RotationZooError):
    """Sigstore's own keys cannot be had, so that nothing can be said of a signature."""


def is_installed() -> bool:
    """Whether the extra `sign` is installed."""
    return find_spec("model_signing") is not None


def check_installed(what: str, otherwise: str = "") -> None:
    """Raise `RotationZooError` if the extra `sign` is missing.

    `what` needs it, in words; `otherwise` ends the hint with a way to do without.
    """
    if not is_installed():
        raise RotationZooError(f"{what} needs the extra `sign`", hint=f"run: {INSTALL}{otherwise}")


def load_trust(path: Path | None) -> "ClientTrustConfig":
    """The keys of Sigstore, or those in a file of the user's own (a `ClientTrustConfig` in JSON).

    Sigstore's are updated through the network (TUF), or with `HF_HUB_OFFLINE` read as they were
    last seen. Raises `NoTrust`.
    """
    from huggingface_hub import constants
    from sigstore.models import ClientTrustConfig

    if path is not None:
        with _as_no_trust(f"{path} cannot be read as a trust configuration", "check the file"):
            return ClientTrustConfig.from_json(path.read_text(encoding="utf-8"))
    hint = "check the network, or name a file of keys with --trust-config"
    with _as_no_trust("Sigstore's keys cannot be fetched", hint):
        offline = constants.HF_HUB_OFFLINE
        return limits.call_within(
            _TRUST_SECONDS, lambda: ClientTrustConfig.production(offline), "Sigstore"
        )


@contextmanager
def _as_no_trust(what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the libraries have no common type of error
        raise NoTrust(f"{what}: {first_sentence(error)}", hint=hint) from error


OWNERS_HINT = "do not use it; ask its owners what happened"
# What the library says of a certificate that is not valid yet, or no longer: it has one type of
# error for everything that is wrong with a certificate.
_OUT_OF_TIME = re.compile("not valid at validation time|has expired|not yet valid")
_ISSUER = "1.3.6.1.4.1.57264.1.1"  # of a certificate of Sigstore, as in Fulcio's oid-info.md


def claimed_signer(certificate: bytes, what: str) -> Signer:
    """The identity and the issuer in a certificate (DER), not verified yet.

    Raises `RotationZooError`, naming `what` is signed, if the certificate does not have one of
    each.
    """
    from cryptography import x509

    try:
        extensions = x509.load_der_x509_certificate(certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identities = names.get_values_for_type(x509.UniformResourceIdentifier)
        identities += names.get_values_for_type(x509.RFC822Name)
        issuer = extensions.get_extension_for_oid(x509.ObjectIdentifier(_ISSUER)).value
        assert isinstance(issuer, x509.UnrecognizedExtension)
        (identity,) = identities
        return Signer(identity=identity, issuer=issuer.value.decode())
    # A hostile certificate raises errors of many types, which have no common one.
    except Exception as error:
        raise RotationZooError(
            f"the signature of {what} has no certificate that names its signer", hint=OWNERS_HINT
        ) from error


def verify_bundle(bundle: Bundle, signer: Signer, what: str, trust_config: Path | None) -> None:
    """Verify that `signer` made the signature, over the very payload that was read.

    Raises `NoTrust` if Sigstore's keys cannot be had, and `RotationZooError`, naming `what` is
    signed, if the signature does not hold.
    """
    if signer.public_key is not None:
        return _verify_key(bundle, signer.public_key, what)
    return _verify_identity(bundle, signer, what, trust_config)


def _verify_identity(bundle: Bundle, signer: Signer, what: str, trust_config: Path | None) -> None:
    """Verify the certificate's chain and its time, the entry in the transparency log, the identity
    in the certificate, and the signature with its key."""
    from sigstore.errors import CertValidationError
    from sigstore.models import Bundle as SigstoreBundle
    from sigstore.verify import Verifier
    from sigstore.verify.policy import Identity

    trust = load_trust(trust_config)
    try:
        policy = Identity(identity=signer.identity or "", issuer=signer.issuer)
        verifier = Verifier(trusted_root=trust.trusted_root)
        _, payload = verifier.verify_dsse(SigstoreBundle.from_json(bundle.data), policy)
    except CertValidationError as error:
        reason = f"no authority that is trusted gave {signer} its certificate"
        if _OUT_OF_TIME.search(str(error)):
            reason = f"the certificate of {signer} was not valid at the time of signing"
        raise _wrong(what, reason) from error
    except Exception as error:  # as above
        raise _wrong(what, first_sentence(error)) from error
    # A file may be read in two ways by two parsers: what was verified must be what was compared.
    if payload != bundle.payload:
        raise _wrong(what, "it signs something else")


def _verify_key(bundle: Bundle, public_key: str, what: str) -> None:
    """Verify the ECDSA signature of the DSSE envelope, with the hash that belongs to the curve."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    by_size: dict[int, type[hashes.SHA256 | hashes.SHA384 | hashes.SHA512]]
    by_size = {256: hashes.SHA256, 384: hashes.SHA384, 521: hashes.SHA512}
    kind = PAYLOAD_TYPE.encode()
    # The pre-authentication encoding of https://github.com/secure-systems-lab/dsse (protocol.md).
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(bundle.payload), bundle.payload)
    try:
        key = serialization.load_pem_public_key(public_key.encode())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(bundle.signature, message, ec.ECDSA(by_size[key.curve.key_size]()))
    except InvalidSignature as error:
        raise _wrong(what, "it was not made with that key") from error
    except Exception as error:  # as above: an index may list any text as a key
        raise _wrong(what, f"the listed key is none ({first_sentence(error)})") from error


def _wrong(what: str, reason: str) -> RotationZooError:
    return RotationZooError(f"the signature of {what} does not hold: {reason}", hint=OWNERS_HINT)
