"""Failures of Hugging Face as errors of one sentence, and which of them are worth a retry."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from rotationzoo.errors import HubError, RotationZooError, first_sentence
from rotationzoo.network.huggingface_session import BrokenAnswer, asking_huggingface
from rotationzoo.network.limits import NETWORK_HINT
from rotationzoo.zoo.hubs.protocol import SPELLING_HINT

_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_LOGIN_HINT = "run: hf auth login, or set HF_TOKEN to a token that may read and write there"
_UNREADABLE = (
    json.JSONDecodeError,
    UnicodeDecodeError,
    RecursionError,
    KeyError,
    TypeError,
    AttributeError,
)
"""What the client raises when it parses an answer that no real hub would send."""


@contextmanager
def huggingface_errors(
    endpoint: str, repo: str, revision: str | None, token: str | None
) -> Iterator[None]:
    """Turn every failure inside the block into a `RotationZooError`.

    Inside the block, the token is sent to the endpoint alone.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        with asking_huggingface(endpoint, repeats=True):
            yield
    except RotationZooError:
        raise
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        if constants.is_offline_mode():
            raise HubError(
                "HF_HUB_OFFLINE is set: Hugging Face is not asked", hint="unset HF_HUB_OFFLINE"
            ) from error
        sentence = first_sentence(error)
        reason = sentence.partition(": ")[2] or sentence
        raise HubError(
            f"{repo} on Hugging Face cannot be reached ({reason})", hint=NETWORK_HINT
        ) from error
    except Exception as error:  # the client, its transport and the disk raise types of their own
        raise _as_hub_error(error, f"{repo} on Hugging Face", revision, token) from error


def may_pass(error: Exception) -> bool:
    """Whether a retry of the same call may succeed."""
    status = _status(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, BrokenAnswer):
        return True
    # These failures have already used up the time limit of a call.
    has_waited = type(error).__name__.startswith(("Connect", "ReadTimeout"))
    return _is_of_transport(error) and not has_waited


def _as_hub_error(
    error: Exception, where: str, revision: str | None, token: str | None
) -> HubError:
    from huggingface_hub import errors as client_errors

    status = _status(error)
    if isinstance(error, client_errors.RevisionNotFoundError):
        return HubError(f"{where} has no revision {revision}", hint=SPELLING_HINT, missing=True)
    if isinstance(error, client_errors.EntryNotFoundError):
        place = revision or "its head"
        return HubError(f"{where} has no such file at {place}", hint=SPELLING_HINT, missing=True)
    if isinstance(error, client_errors.RepositoryNotFoundError) and status == 404:
        return HubError(f"there is no {where}", hint=SPELLING_HINT, missing=True)
    # Without a token, Hugging Face gives one answer for missing and for private repositories.
    if isinstance(error, client_errors.RepositoryNotFoundError) and token is None:
        hint = f"{SPELLING_HINT}; or {_LOGIN_HINT}"
        return HubError(f"{where} does not exist, or is private", hint=hint, hidden=True)
    if status in (401, 403):
        return HubError(f"{where} refused access", hint=_LOGIN_HINT)
    if status is not None:
        return HubError(f"{where} answered {status}", hint=NETWORK_HINT)
    if isinstance(error, BrokenAnswer) or _is_of_transport(error):
        kind = type(error.__cause__ or error).__name__
        return HubError(f"{where} broke off its answer ({kind})", hint=NETWORK_HINT)
    if isinstance(error, OSError):
        reason = error.strerror or first_sentence(error)
        return HubError(f"{where} cannot be used: {reason}", hint=NETWORK_HINT)
    if isinstance(error, _UNREADABLE):
        return HubError(
            f"{where} sent an answer that is none of a hub's",
            hint="check HF_ENDPOINT, and the network's proxy",
        )
    return HubError(f"{where} cannot be used: {first_sentence(error)}", hint=NETWORK_HINT)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_of_transport(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in _TRANSPORTS
