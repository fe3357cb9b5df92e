"""The libraries of the extra `sign`, and their trust in Sigstore's keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.network import limits

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
