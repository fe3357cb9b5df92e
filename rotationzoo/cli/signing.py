"""Signing what a command publishes, as its options ask for it."""

from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.errors import UsageError

if TYPE_CHECKING:
    from rotationzoo.cli.output import Output
    from rotationzoo.zoo.signed_index import IndexSigner
    from rotationzoo.zoo.signing.make import SigningTool
    from rotationzoo.zoo.upload import Upload

KEYLESS, NONE = "keyless", "none"
_IN_CI = (
    "a job of GitHub Actions with `id-token: write` signs what it publishes unless told otherwise, "
    "and that"
)


def choose_tool(sign: str | None, trust_config: Path | None) -> "SigningTool | None":
    """What to sign with, as `--sign` says; None for nothing.

    Without the option, a job of GitHub Actions that has an identity signs keyless. Raises
    `UsageError` for a value that is neither a word of the option nor a file.
    """
    from rotationzoo.zoo.signing.make import SigningTool, can_sign_in_ci

    if sign is None and can_sign_in_ci():
        return SigningTool(None, trust_config, _IN_CI)
    if sign in (None, NONE):
        return None
    if sign == KEYLESS:
        return SigningTool(None, trust_config)
    key = Path(sign).expanduser()
    if not key.is_file():
        raise UsageError(
            f"--sign {sign} is no file of a key", hint="write: --sign key.pem, or --sign keyless"
        )
    return SigningTool(key, trust_config)


def sign_upload(
    out: "Output", upload: "Upload", tool: "SigningTool | None", anew: bool
) -> "Upload":
    """Sign what goes to a hub, and say who signed it, or that nobody did.

    A signature that the artifact came with is kept, unless the user asks to sign it `anew`.
    """
    if tool is not None and (anew or not upload.is_signed):
        upload = upload.signed_by(tool)
        out.note(f"Note: it is signed by {upload.entry.signer}")
    elif upload.is_signed:
        named = upload.entry.signer
        claim = "" if named is None else f", which names {named} and was not checked"
        out.note(f"Note: it keeps the signature that it came with{claim}")
    else:
        out.note("Note: it is not signed; to sign it, add: --sign key.pem, or --sign keyless")
    return upload


def index_signer(tool: "SigningTool | None", adopt: bool) -> "IndexSigner | None":
    """What signs the index; None for nothing. Raises `UsageError` for `adopt` without a tool."""
    from rotationzoo.zoo.signed_index import IndexSigner

    if tool is None:
        if adopt:
            raise UsageError("--adopt-index signs nothing alone", hint="add: --sign key.pem")
        return None
    return IndexSigner(tool, adopt)
