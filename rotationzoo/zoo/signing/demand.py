"""What a user asks of signatures: whose are accepted, and whether there must be one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from rotationzoo.errors import UsageError
from rotationzoo.zoo.signing.extra import check_installed
from rotationzoo.zoo.signing.signer import Signer, parse_signer


@dataclass(frozen=True)
class Demand:
    """What a user asks of signatures."""

    signers: tuple[Signer, ...] = ()
    """Whose signature is accepted. Empty if the user named nobody."""
    required: bool = False
    """Whether even an index that was read from a hub must be signed."""
    trust_config: Path | None = None
    """A file of keys to trust in place of Sigstore's own."""


class SignatureOptions(TypedDict, total=False):
    """What to ask of signatures. Without any of these, a signature is checked if there is one."""

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
        raise UsageError("--issuer says who vouches for nobody", hint="add: --signer IDENTITY")
    if named or required:
        check_installed("checking a signature")
    signers = tuple(parse_signer(name, issuer) for name in named)
    return Demand(signers, required, options.get("trust_config"))
