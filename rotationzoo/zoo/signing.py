"""Signatures of artifacts and indexes, with a key, or keyless with the identity of a CI job or a
person. Checks: a signature is valid, for these files, and by an accepted signer.

The format and the library (the extra `sign`) are those of OpenSSF Model Signing
(https://github.com/ossf/model-signing-spec). The library must be told who signed.
"""

import base64
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, Literal

from pydantic import AliasPath, Field

from rotationzoo.artifact.store import CARD, MANIFEST, SIGNATURE, Artifact
from rotationzoo.errors import RotationZooError, UsageError, as_refusal, first_sentence
from rotationzoo.network import limits
from rotationzoo.network.tokens import check_token
from rotationzoo.settings import Signatures
from rotationzoo.settings_base import as_tuple
from rotationzoo.storage import files, strict_json
from rotationzoo.storage.folders import link
from rotationzoo.storage.strict_json import Sha256, Strict
from rotationzoo.zoo.index import GITHUB_ACTIONS, Signer, describe_key

_LIMIT = 1 << 20  # bytes; a signature of the demo model's artifact has 5,530, or 1,779 with a key
INSTALL = "pip install 'model-signing>=1.1' 'pyopenssl>=25.3'"
OWNERS_HINT = "do not use it; ask its owners what happened"
_HINT = "fetch it again; if that does not help, tell the owners of the repository"
_TRUST_SECONDS = 30.0  # for half a dozen small files from Sigstore's own repository
# An artifact's signature does not cover itself, nor the card, which is rendered from the manifest.
UNSIGNED = CARD, SIGNATURE
# The library's messages for a certificate that was not valid then: it has no type for that error.
_OUT_OF_TIME = re.compile("not valid at validation time|has expired|not yet valid")
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_KEY_BYTES = 10_000  # the largest allowed key, P-521, has 300 in PEM
_ISSUER = "1.3.6.1.4.1.57264.1.1"  # in a certificate of Sigstore, from Fulcio's oid-info.md


def parse_signer(text: str, issuer: str | None) -> Signer:
    """The signer in `--signer`: the file of a public key, or an identity. Raises `UsageError` if
    the identity needs an `issuer`, and as `read_key`."""
    if text.endswith((".pem", ".pub")):
        return read_key(Path(text).expanduser())
    if issuer is None and text.startswith("https://github.com/"):  # the identity of a workflow
        issuer = GITHUB_ACTIONS
    if issuer is None:
        hint = "add the issuer of that identity, such as: --issuer https://accounts.google.com"
        raise UsageError(f"{text} is an identity without an issuer", hint)
    return Signer(identity=text, issuer=issuer)


def read_key(path: Path, private: bool = False) -> Signer:
    """The signer with the key in a PEM file. Raises `RotationZooError` for other files."""
    data = files.read(path.resolve(), _KEY_BYTES)
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    # The hint does not name this file: openssl would overwrite it, and it may be the other key.
    kind, hint = "public", "make one of a private key: openssl ec -in key.pem -pubout -out new.pem"
    if private:
        kind = "private"
        hint = "make one with: openssl ecparam -genkey -name prime256v1 -noout -out new.pem"
    try:
        if private:
            key: Any = serialization.load_pem_private_key(data, None).public_key()
        else:
            key = serialization.load_pem_public_key(data)
    except TypeError as error:
        problem = f"{path} is encrypted, and encrypted keys are not supported"
        hint = f"decrypt it into a new file: openssl ec -in {path} -out plain.pem"
        raise RotationZooError(problem, hint) from error
    except ValueError as error:
        raise RotationZooError(f"{path} contains no {kind} key in PEM", hint) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise RotationZooError(f"{path} is not a key of P-256, P-384 or P-521", hint)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return Signer(public_key=key.public_bytes(serialization.Encoding.PEM, form).decode())


@dataclass(frozen=True)
class Demand:
    """The signatures that a user accepts, or with `required` even demands of an index from a hub.
    `trust_config`: a file of keys to trust instead of Sigstore's."""

    signers: tuple[Signer, ...] = ()
    required: bool = False
    trust_config: Path | None = None

    def naming(self, listed: Signer | None, what: str) -> "Demand":
        """The same, but unless the user named signers, with the one `listed` in an index that they
        named. Raises `RotationZooError` if a signature is required and no signer is known."""
        signers = self.signers or (() if listed is None else (listed,))
        if self.required and not signers:
            hint = "name the signer with --signer: an identity, or the file of a public key"
            raise RotationZooError(f"it is not known who should have signed {what}", hint)
        return replace(self, signers=signers)


def make_demand(asked: Signatures) -> Demand:
    """The demand from options. Raises `UsageError` for an issuer without an identity, and
    `RotationZooError` if the extra `sign` is needed and missing."""
    named = as_tuple(asked.signers)
    if asked.issuer is not None and not named:
        raise UsageError("--issuer needs a --signer that it vouches for", "add: --signer IDENTITY")
    if named or asked.require_signature:
        check_installed("checking a signature")
    parsed = tuple(parse_signer(name, asked.issuer) for name in named)
    return Demand(parsed, asked.require_signature, asked.trust_config)


def is_installed() -> bool:
    """Whether the extra `sign` is installed."""
    return find_spec("model_signing") is not None


def check_installed(what: str, otherwise: str = "") -> None:
    """Raise `RotationZooError` if `what` needs the extra `sign` and it is missing. `otherwise`: an
    alternative, for the end of the hint."""
    if not is_installed():
        raise RotationZooError(f"{what} needs the extra `sign`", hint=f"run: {INSTALL}{otherwise}")


@dataclass(frozen=True)
class Signed:
    """An artifact or an index that may be signed. `files`: name -> file or content; the signature
    must cover all but `UNSIGNED`. `listed`: the signer in the index of a repository."""

    what: str
    files: Mapping[str, Path | bytes]
    signature: bytes | None
    listed: Signer | None = None


@dataclass(frozen=True)
class Finding:
    """The result of a check that refused nothing."""

    state: Literal["unsigned", "unchecked", "signed"]
    note: str
    signer: Signer | None = None

    def summary(self) -> dict[str, Any]:
        """As JSON: the state, and the signer's known fields."""
        signer = self.signer.model_dump(exclude_none=True) if self.signer else None
        return {"state": self.state, "signer": signer}


_CERTIFICATE = AliasPath("verificationMaterial", "certificate", "rawBytes")
_KEY_HINT = AliasPath("verificationMaterial", "publicKey", "hint")


class _Maker(Strict):
    """A signer: a certificate, in DER and base64, or the sha256 of a public key in PEM."""

    certificate: str | None = Field(None, validation_alias=_CERTIFICATE)
    key_sha256: Sha256 | None = Field(None, validation_alias=_KEY_HINT)


def claimed_signer(data: bytes, what: str) -> Signer | str:
    """The signer that a signature of `what` names, not verified yet; of a key, its sha256. Raises
    `RotationZooError` for a damaged file, and for a certificate without exactly one identity."""
    origin = f"the signature of {what}"
    maker = strict_json.validate(_Maker, strict_json.parse(data, origin, _HINT), origin, _HINT)
    if maker.certificate is None and maker.key_sha256 is not None:
        return maker.key_sha256
    if maker.certificate is None or maker.key_sha256 is not None:
        raise RotationZooError(f"{origin} is damaged: it has no certificate or key", hint=_HINT)
    from cryptography import x509

    try:
        certificate = x509.load_der_x509_certificate(base64.b64decode(maker.certificate))
        extensions = certificate.extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identities = names.get_values_for_type(x509.UniformResourceIdentifier)
        identities += names.get_values_for_type(x509.RFC822Name)
        issuer = extensions.get_extension_for_oid(x509.ObjectIdentifier(_ISSUER)).value
        (identity,) = identities
        return Signer(identity=identity, issuer=issuer.public_bytes().decode())
    except Exception as error:  # a hostile certificate raises errors of many types
        problem = f"{origin} has no certificate that names its signer"
        raise RotationZooError(problem, OWNERS_HINT) from error


def check_signature(signed: Signed, demand: Demand) -> Finding:
    """Check a signature. Raises `RotationZooError` if it is wrong. If a signature is required or a
    signer named, that includes a signature that is missing or cannot be checked."""
    what, listed = signed.what, signed.listed
    expected = demand.naming(None, what).signers
    candidates = expected or (() if listed is None else (listed,))
    if signed.signature is None:
        if candidates:
            problem = f"{what} has no signature, and should have one by {candidates[0]}"
            hint = "do not use it unless its owners say why it is not signed"
            raise RotationZooError(problem, hint)
        return Finding("unsigned", f"{what} is not signed: nothing shows who made it")
    if not is_installed():
        lacking = f"{what} is signed, but the signature was not checked"
        if expected:
            raise RotationZooError(f"{lacking}: the extra `sign` is missing", INSTALL)
        return Finding("unchecked", f"{lacking}; to check it, run: {INSTALL}")
    claimed = claimed_signer(signed.signature, what)
    signer = _choose_signer(claimed, candidates, what)
    if signer is None:
        note = f"{what} is signed with {_words(claimed)}, which was not checked: add "
        return Finding("unchecked", f"{note}--signer KEY.pem")
    try:
        verifier = _verifier_of(signer, demand.trust_config)
    except RotationZooError as error:
        if expected:
            raise
        return Finding("unchecked", f"{what} is signed, but was not checked: {error}")
    _verify(signed, signed.signature, signer, verifier)
    more = "" if expected else "; to accept no other, add --signer"
    return Finding("signed", f"{what} is signed by {signer}{more}", signer)


def _words(claimed: Signer | str) -> str:
    return describe_key(claimed) if isinstance(claimed, str) else str(claimed)


def _choose_signer(
    claimed: Signer | str, candidates: tuple[Signer, ...], what: str
) -> Signer | None:
    """The candidate that the signature names, or without candidates the signer that it names. None
    for an unknown key. Raises `RotationZooError` for another signer."""
    if not candidates:
        return claimed if isinstance(claimed, Signer) else None
    for candidate in candidates:
        if claimed in (candidate, candidate.key_sha256):
            return candidate
    wanted = " or ".join(map(str, candidates))
    hint = "do not use it; or if you trust that signer too, name it with --signer"
    raise RotationZooError(f"{what} is signed by {_words(claimed)}, not by {wanted}", hint)


def _verifier_of(signer: Signer, trust_config: Path | None) -> Any:
    """The library's verifier for a signer. The keys that vouch for identities are in a file, or are
    Sigstore's, which are fetched. Raises `RotationZooError`."""
    from model_signing import verifying

    verifier, public_key = verifying.Config(), signer.public_key
    if public_key is not None:
        with as_refusal("the listed key is invalid", OWNERS_HINT), NamedTemporaryFile() as file:
            file.write(public_key.encode())
            file.flush()
            return verifier.use_elliptic_key_verifier(public_key=file.name)
    problem = "Sigstore's keys cannot be fetched"
    hint = "check the network, or name a file of keys with --trust-config"
    if trust_config is not None:
        problem, hint = f"{trust_config} cannot be read as a trust configuration", "check the file"
    names = {"identity": signer.identity, "oidc_issuer": signer.issuer}
    use = partial(verifier.use_sigstore_verifier, **names, trust_config=trust_config)
    with as_refusal(problem, hint):
        return limits.call_within(_TRUST_SECONDS, use, "Sigstore")


def _verify(signed: Signed, signature: bytes, signer: Signer, verifier: Any) -> None:
    """Raise `RotationZooError` unless the signature is by this signer, and for these files."""
    from cryptography.exceptions import InvalidSignature
    from sigstore.errors import CertValidationError

    what = f"the signature of {signed.what}"
    try:
        with gathered(signed.files) as folder:
            place = folder.with_name(SIGNATURE)
            place.write_bytes(signature)
            verifier.verify(folder, place)
    except Exception as error:  # the libraries have no common type of error
        reason = first_sentence(error)
        if reason.startswith("Signature mismatch"):
            names = [name for name in sorted(signed.files) if name in reason]
            other = f"{names[0]} differs" if names else "one is missing"
            raise RotationZooError(f"{what} is for other files: {other}", OWNERS_HINT) from error
        if isinstance(error, InvalidSignature):
            reason = "it was not made with that key"
        if isinstance(error, CertValidationError):
            reason = f"no trusted authority issued the certificate of {signer}"
            if _OUT_OF_TIME.search(str(error)):
                reason = f"the certificate of {signer} was not valid at the time of signing"
        raise RotationZooError(f"{what} is invalid: {reason}", OWNERS_HINT) from error


@contextmanager
def gathered(named: Mapping[str, Path | bytes], name: str = "files") -> Iterator[Path]:
    """Yield a temporary folder of the files (name -> file or content) that are signed."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, name)
        folder.mkdir()
        for each, content in named.items():
            if each in UNSIGNED:
                continue
            if isinstance(content, bytes):
                (folder / each).write_bytes(content)
            else:
                link(content, folder / each)
        yield folder


def read_signature(folder: Path) -> bytes | None:
    """The signature in an artifact's folder, or None. Raises `RotationZooError`."""
    path = folder / SIGNATURE
    return None if files.size_of(path) is None else files.read(path, _LIMIT)


def check_artifact(artifact: Artifact, demand: Demand) -> Finding:
    """Check the signature of an artifact without an index. Raises as `check_signature`."""
    folder = artifact.folder
    names = MANIFEST, *artifact.manifest.files
    listed = {name: files.regular_file(folder, name) for name in names}
    return check_signature(Signed(str(folder), listed, read_signature(folder)), demand)


def can_sign_in_ci() -> bool:
    """Whether this is a job of GitHub Actions with `id-token: write`."""
    return all(map(os.environ.get, ("GITHUB_ACTIONS", "ACTIONS_ID_TOKEN_REQUEST_TOKEN")))


class SigningTool:
    """Signs files, any number of times, always as the same signer."""

    def __init__(self, key: Path | None, trust_config: Path | None = None, why: str = "signing"):
        """`key`: the file of a private key in PEM, None for keyless signing; `why`: what needs a
        signature. Raises `RotationZooError` without the extra `sign` or such a key."""
        check_installed(why, "; or publish unsigned, with: --sign none")
        self.key, self.trust_config = key, trust_config
        # None before the first keyless signature, whose certificate names the signer.
        self.signer = None if key is None else read_key(key, private=True)

    @as_refusal(
        "it cannot be signed", "check the network and the identity, or sign with: --sign key.pem"
    )
    def sign(self, files: Mapping[str, Path | bytes], name: str) -> tuple[bytes, Signer]:
        """The signature of these files (name -> file or content) but the `UNSIGNED`, which its
        statement calls `name`, and its signer. Raises `RotationZooError`."""
        from model_signing import hashing, signing

        # Other tools must know which files in the artifact's folder to ignore.
        ignored = hashing.Config().set_ignored_paths(paths=[*UNSIGNED], ignore_git_paths=False)
        config = signing.Config().set_hashing_config(ignored)
        if self.key is not None:
            config.use_elliptic_key_signer(private_key=self.key)
        else:
            from sigstore.oidc import detect_credential

            # New for each signature: it expires within minutes. At a terminal, a person can log in.
            token = detect_credential()
            if token is None and not sys.stdin.isatty():
                problem = "there is no identity to sign with: this is not a CI job that has one"
                hint = "give the job `permissions: id-token: write`, or sign with: --sign key.pem"
                raise RotationZooError(problem, hint)
            token = check_token(token, "the identity of this job")  # so that it is redacted
            config.use_sigstore_signer(identity_token=token, trust_config=self.trust_config)
        with gathered(files, name) as folder:
            target = folder.with_name(SIGNATURE)
            config.sign(folder, target)
            data = target.read_bytes()
        if isinstance(claimed := claimed_signer(data, name), Signer):
            self.signer = claimed
        assert self.signer is not None
        return data, self.signer
