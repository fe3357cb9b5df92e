"""Making a signature: with a key, or with the identity of this CI job or person (keyless)."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rotationzoo.artifact.store import SIGNATURE
from rotationzoo.errors import RotationZooError, as_refusal
from rotationzoo.network.tokens import check_token
from rotationzoo.zoo.signing.check import UNSIGNED, check_installed, claimed_signer, gathered
from rotationzoo.zoo.signing.signer import Signer, read_key

# GitHub sets the second for jobs with `id-token: write` alone.
_CI_VARIABLES = ("GITHUB_ACTIONS", "ACTIONS_ID_TOKEN_REQUEST_TOKEN")


def can_sign_in_ci() -> bool:
    """Whether this is a job of GitHub Actions that may ask for a token of its identity."""
    return all(os.environ.get(name) for name in _CI_VARIABLES)


class SigningTool:
    """Signs files, any number of times, always as the same signer."""

    def __init__(self, key: Path | None, trust_config: Path | None = None, why: str = "signing"):
        """`key` is the file of a private key in PEM, or None for keyless signing; `why` says what
        needs a signature. Raises `RotationZooError` without the extra `sign` or such a key."""
        check_installed(why, "; or publish unsigned, with: --sign none")
        self.key, self.trust_config = key, trust_config
        self.signer = None if key is None else read_key(key, private=True)
        """The signer that its signatures name. None before the first keyless one, whose
        certificate says who it is."""

    @as_refusal(
        "it cannot be signed", "check the network and the identity, or sign with: --sign key.pem"
    )
    def sign(self, files: Mapping[str, Path | bytes], name: str) -> tuple[bytes, Signer]:
        """The signature of these files (name -> file or content) but `UNSIGNED`, which its
        statement calls `name` together, and who it shows as its signer. Raises
        `RotationZooError`."""
        from model_signing import hashing, signing

        # They lie in the folder of an artifact, so a reader's tool must not ask for them.
        ignored = hashing.Config().set_ignored_paths(paths=[*UNSIGNED], ignore_git_paths=False)
        config = signing.Config().set_hashing_config(ignored)
        if self.key is not None:
            config.use_elliptic_key_signer(private_key=self.key)
        else:
            # Anew for each signature: the token of a CI job expires within minutes, and an upload
            # between two signatures may take longer.
            config.use_sigstore_signer(identity_token=_find_token(), trust_config=self.trust_config)
        with gathered(files, name) as folder:
            target = folder.with_name(SIGNATURE)
            config.sign(folder, target)
            data = target.read_bytes()
        if isinstance(claimed := claimed_signer(data, name), Signer):
            self.signer = claimed
        assert self.signer is not None
        return data, self.signer


def _find_token() -> str | None:
    """The token of this CI job's identity; None at a terminal, where a person can log in. Raises
    `RotationZooError` if there is neither."""
    from sigstore.oidc import detect_credential

    token = detect_credential()
    if token is None and not sys.stdin.isatty():
        problem = "there is no identity to sign with: this is not a CI job that has one"
        hint = "give the job `permissions: id-token: write`, or sign with: --sign key.pem"
        raise RotationZooError(problem, hint)
    return check_token(token, "the identity of this job")  # so that it is redacted
