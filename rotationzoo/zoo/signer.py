"""Signers: identities that an OpenID Connect issuer vouches for, and keys."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.storage import files

GITHUB_ACTIONS = "https://token.actions.githubusercontent.com"
_WORKFLOW = "https://github.com/"  # the identity of a workflow begins with its repository
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_KEY_BYTES = 10_000  # the largest allowed key, P-521, has 300 in PEM
_Text = Annotated[str, Field(min_length=1, max_length=500)]
_Pem = Annotated[str, Field(pattern="^-----BEGIN PUBLIC KEY-----\n", max_length=1000)]


class Signer(BaseModel):
    """A signer: `identity` and `issuer` as in a Sigstore certificate, or an elliptic-curve public
    key in PEM. The identity of a workflow names its repository, its file, and the branch or tag."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    identity: _Text | None = None
    issuer: _Text | None = None
    public_key: _Pem | None = None

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "Signer":
        named = {self.identity is not None, self.issuer is not None, self.public_key is None}
        if len(named) > 1:
            raise ValueError("a signer is an identity and its issuer, or a public key")
        return self

    @property
    def key_sha256(self) -> str | None:
        """The sha256 of the public key in PEM, which identifies the key in a signature."""
        return self.public_key and files.digest(self.public_key.encode())

    def __str__(self) -> str:
        if self.key_sha256 is not None:
            return describe_key(self.key_sha256)
        if self.issuer == GITHUB_ACTIONS:  # the identity is clearly a GitHub workflow
            return str(self.identity)
        return f"{self.identity} (of {self.issuer})"


def describe_key(sha256: str) -> str:
    """A key in words, from the sha256 of its PEM."""
    return f"the key {sha256[:16]}"


def parse_signer(text: str, issuer: str | None) -> Signer:
    """The signer in `--signer`: the file of a public key, or an identity. Raises `UsageError` if
    the identity needs an `issuer`, and as `read_key`."""
    if text.endswith((".pem", ".pub")):
        return read_key(Path(text).expanduser())
    if issuer is None and text.startswith(_WORKFLOW):
        issuer = GITHUB_ACTIONS
    if issuer is None:
        hint = "add the issuer of that identity, such as: --issuer https://accounts.google.com"
        raise UsageError(f"{text} is an identity without an issuer", hint)
    return Signer(identity=text, issuer=issuer)


def read_key(path: Path, private: bool = False) -> Signer:
    """The signer with the key in a PEM file, public or `private`. Raises `RotationZooError` for
    other files."""
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
        raise RotationZooError(f"{path} holds no {kind} key in PEM", hint) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise RotationZooError(f"{path} is not a key of P-256, P-384 or P-521", hint)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return Signer(public_key=key.public_bytes(serialization.Encoding.PEM, form).decode())
