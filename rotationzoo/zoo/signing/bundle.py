"""Reading a signature file: what it claims, before anything of it has been checked.

The format is that of OpenSSF Model Signing: a Sigstore bundle (v0.3) around a DSSE envelope, whose
in-toto statement lists files with their sha256
(https://github.com/ossf/model-signing-spec). Nothing here needs the extra `sign`.
"""

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rotationzoo.errors import RotationZooError
from rotationzoo.storage import strict_json
from rotationzoo.storage.strict_json import Sha256, Strict

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
