"""The cryptography of a signature: whom its certificate names, and whether it holds."""

import re
from pathlib import Path

from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.zoo.signing.bundle import PAYLOAD_TYPE, Bundle
from rotationzoo.zoo.signing.extra import load_trust
from rotationzoo.zoo.signing.signer import Signer

OWNERS_HINT = "do not use it; ask its owners what happened"
# What the library says of a certificate that is not valid yet, or no longer: it has one type of
# error for everything that is wrong with a certificate.
_OUT_OF_TIME = re.compile("not valid at validation time|has expired|not yet valid")
_ISSUER = "1.3.6.1.4.1.57264.1.1"  # of a certificate of Sigstore, as in Fulcio's oid-info.md


def claimed_signer(certificate: bytes, what: str) -> Signer:
    """The identity and the issuer in a certificate (DER), which nobody has verified yet.

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
