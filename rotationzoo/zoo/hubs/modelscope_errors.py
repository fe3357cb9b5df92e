"""Failures of ModelScope as errors of one sentence, and which of them are worth a retry."""

from collections.abc import Iterator
from contextlib import contextmanager

from rotationzoo.errors import HubError, RotationZooError, first_sentence
from rotationzoo.network.limits import NETWORK_HINT
from rotationzoo.zoo.hubs.protocol import SPELLING_HINT


@contextmanager
def modelscope_errors(repo: str) -> Iterator[None]:
    """Turn every failure inside the block into a `RotationZooError`."""
    import requests
    from huggingface_hub import constants
    from modelscope_hub import errors as client_errors

    where = f"{repo} on ModelScope"
    if constants.is_offline_mode():
        raise HubError(
            "HF_HUB_OFFLINE is set: ModelScope is not asked", hint="unset HF_HUB_OFFLINE"
        )
    try:
        yield
    except RotationZooError:
        raise
    except (client_errors.NotFoundError, client_errors.NotExistError) as error:
        raise HubError(
            f"{where} is not there, or has no such file or revision",
            hint=SPELLING_HINT,
            missing=True,
        ) from error
    except (client_errors.AuthenticationError, client_errors.PermissionDeniedError) as error:
        raise HubError(
            f"{where} refused access", hint="set MODELSCOPE_API_TOKEN to a token that may write"
        ) from error
    except client_errors.APIError as error:
        raise HubError(f"{where} answered {error.status_code}", hint=NETWORK_HINT) from error
    except (client_errors.NetworkError, requests.ConnectionError, requests.Timeout) as error:
        raise HubError(f"{where} broke off its answer", hint=NETWORK_HINT) from error
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        # The client raises these when it parses an answer that no real hub would send.
        raise HubError(
            f"{where} sent an answer that is none of a hub's",
            hint="check MODELSCOPE_ENDPOINT, and the network's proxy",
        ) from error
    except Exception as error:
        raise HubError(
            f"{where} cannot be used: {first_sentence(error)}", hint=NETWORK_HINT
        ) from error


def may_pass(error: Exception) -> bool:
    """Whether a retry of the same call may succeed."""
    import requests
    from modelscope_hub import errors as client_errors

    return isinstance(
        error,
        client_errors.NetworkError
        | client_errors.ServerError
        | client_errors.RateLimitError
        | requests.RequestException,
    )
