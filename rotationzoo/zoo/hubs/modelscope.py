"""The ModelScope hub: files are published in a commit, then tagged to mark them complete."""

import io
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from rotationzoo.errors import HubError, RotationZooError, first_sentence
from rotationzoo.network import limits, tokens
from rotationzoo.storage.files import digest
from rotationzoo.zoo.hubs.protocol import SPELLING_HINT, Hub, Publication, Published

_STORAGE_PREFIXES = ("", "lfs.", "pre-lfs.", "www.")
_CHUNK_BYTES = 1 << 20
_BRANCH = "master"
# The client reads these variables when it is imported. Only `retry` repeats calls: the client
# itself would wait silently for minutes, or for half an hour if the hub asked it to.
_SETTINGS = {
    "MODELSCOPE_DOWNLOAD_INTRA_CLOUD": "false",  # the probe for an internal network costs 0.2 s
    "MODELSCOPE_UPLOAD_BLOB_MAX_ATTEMPTS": "1",
    "MODELSCOPE_UPLOAD_COMMIT_MAX_ATTEMPTS": "1",
    "MODELSCOPE_UPLOAD_COMMIT_MAX_RETRY_AFTER_SECONDS": "10",
    "MODELSCOPE_UPLOAD_FAILED_FILE_MAX_RETRY_ROUNDS": "1",
    "MODELSCOPE_UPLOAD_RECOVERY_ENABLED": "false",
}


def may_see_token(endpoint: str, url: str) -> bool:
    """Whether a URL is at the endpoint, or by HTTPS at its domain's storage, such as `lfs.`."""
    home, parts = urlsplit(endpoint), urlsplit(url)
    domain = (home.hostname or "").lower().removeprefix("www.")
    # A name without a dot is a host on the local network, which has no subdomains.
    is_secure = home.scheme == parts.scheme == "https" and "." in domain
    hosts = [f"{prefix}{domain}" for prefix in _STORAGE_PREFIXES]
    at_storage = is_secure and (parts.hostname or "").lower() in hosts
    return at_storage or tokens.is_at(url, [endpoint])


class LimitedAdapter(HTTPAdapter):
    """Applies the limits to every request of a session, including redirects."""

    def __init__(self, endpoint: str, reads_all: bool):
        """`reads_all`: read the whole answer here, up to the limit for small answers."""
        super().__init__(max_retries=0)
        self.endpoint, self.reads_all = endpoint, reads_all

    def send(  # type: ignore[override]
        self, request: Any, stream: bool = False, timeout: Any = None, **options: Any
    ) -> requests.Response:
        """Send a request. Our limits replace the client's `stream` and `timeout`."""
        host = urlsplit(request.url).netloc.rpartition("@")[2]
        if not may_see_token(self.endpoint, request.url):
            for name in ("Authorization", "Cookie"):
                request.headers.pop(name, None)
        request.headers["Accept-Encoding"] = "identity"
        is_read = request.method in ("GET", "HEAD")
        silence = limits.SILENCE_SECONDS if is_read else limits.UPLOAD_SECONDS
        options |= {"stream": True, "timeout": (limits.CONNECT_SECONDS, silence)}
        plain_send = super().send

        def answer() -> requests.Response:
            response = plain_send(request, **options)
            limits.check_encoding(response.headers, host)
            if self.reads_all or response.is_redirect or not response.ok:
                # Read it within the limits, for the client to read again.
                most, seconds = limits.ANSWER_BYTES, limits.UPLOAD_SECONDS
                body = b"".join(limits.limit_chunks(read_chunks(response), most, host, seconds))
                response.close()
                response.raw = io.BytesIO(body)
            return response

        try:
            return limits.call_within(limits.ANSWER_SECONDS, answer, host) if is_read else answer()
        except (requests.ConnectionError, TimeoutError) as error:
            # requests has no exception types that tell these two failures apart.
            says, unreached = "cannot be reached", ("NewConnectionError", "NameResolutionError")
            if isinstance(error, (requests.ConnectTimeout, TimeoutError)):
                says = f"did not answer within {limits.ANSWER_SECONDS:g} s"
            elif not any(name in str(error) for name in unreached):
                raise
            raise HubError(f"ModelScope ({host}) {says}", hint=limits.NETWORK_HINT) from error


def read_chunks(response: requests.Response) -> Iterator[bytes]:
    """The body of an answer in chunks, as they arrive. Raises `requests.ConnectionError` if the
    connection breaks, and `HubError` if the hub is silent for too long."""
    raw: Any = response.raw
    try:
        while chunk := raw.read1(_CHUNK_BYTES):
            yield chunk
    except urllib3.exceptions.ReadTimeoutError as error:
        silence = f"ModelScope sent nothing for {limits.SILENCE_SECONDS:g} s"
        raise HubError(silence, limits.NETWORK_HINT) from error
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError("the answer broke off") from error


@contextmanager
def _asking(repo: str) -> Iterator[None]:
    """Turn failures into a `RotationZooError`, and hide the client's output."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        raise HubError("HF_HUB_OFFLINE is set: ModelScope is not asked", "unset HF_HUB_OFFLINE")
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            yield
    except RotationZooError:
        raise
    except Exception as error:
        raise _as_hub_error(error, f"{repo} on ModelScope") from error


def _as_hub_error(error: Exception, where: str) -> HubError:
    from modelscope_hub import errors

    says, hint = f"cannot be used: {first_sentence(error)}", limits.NETWORK_HINT
    if isinstance(error, (errors.NotFoundError, errors.NotExistError)):
        says, hint = "is not there, or has no such file or revision", SPELLING_HINT
    elif isinstance(error, (errors.AuthenticationError, errors.PermissionDeniedError)):
        says, hint = "refused access", "set MODELSCOPE_API_TOKEN to a token that may write"
    elif isinstance(error, errors.APIError):
        says = f"answered {error.status_code}"
    elif isinstance(error, (errors.NetworkError, requests.ConnectionError, requests.Timeout)):
        says = "closed the connection early"
    elif isinstance(error, (ValueError, TypeError, AttributeError, KeyError, RecursionError)):
        # The client raises these when it parses an answer that no real hub would send.
        says = "sent an invalid answer"
        hint = "check MODELSCOPE_ENDPOINT, and the network's proxy"
    return HubError(f"{where} {says}", hint=hint, missing=hint == SPELLING_HINT)


class ModelScope(Hub):
    """ModelScope, accessed through its own client, which is imported with `_SETTINGS`."""

    pins_by_tag = True

    def __init__(self) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from modelscope_hub import HubApi, HubConfig

        variable = tokens.MODELSCOPE_VARIABLE
        self.token = tokens.check_token(os.environ.get(variable), variable)
        # With None, the client would unpickle what `modelscope login` stored.
        config = HubConfig(token=self.token or "")
        self.endpoint = str(config.endpoint)
        self.api, self.files = HubApi(config=config), requests.Session()
        self.api.openapi._max_retries = 1
        clients = self.api.openapi, self.api.legacy
        sessions = [each for its in clients for each in (its._session, its._read_session)]
        for session in (*sessions, self.files):
            adapter = LimitedAdapter(self.endpoint, reads_all=session is not self.files)
            session.mount("https://", adapter)
            session.mount("http://", adapter)
        # The client logs every step, and every failure that it raises.
        logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)

    @staticmethod
    def may_pass(error: Exception) -> bool:
        from modelscope_hub import errors

        temporary = errors.NetworkError, errors.ServerError, errors.RateLimitError
        return isinstance(error, (*temporary, requests.RequestException))

    def resolve(self, repo: str) -> str:
        """The branch `master`. ModelScope cannot read from a commit."""
        with _asking(repo):
            self.retry(self.api.get_repo, repo, "model")
        return _BRANCH

    def fetch(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        with _asking(repo):
            self.retry(self._save, repo, revision, path, size, folder)

    def _save(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        from modelscope_hub.errors import raise_for_status

        url = self.api.legacy.get_download_url(repo, "model", path, revision or _BRANCH)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        cookies = {"m_session_id": self.token} if self.token else None
        with self.files.get(url, headers=headers, cookies=cookies, stream=True) as response:
            raise_for_status(response)
            what = f"{path} of {repo} on ModelScope"
            chunks, told = read_chunks(response), response.headers
            limits.save_chunks(chunks, folder / path, size, what, told)

    def publish(self, publication: Publication) -> Published:
        """Commit, then add the tag for complete files. `create_pr` has no effect."""
        from modelscope_hub.errors import AlreadyExistsError

        repo, tag = publication.repo, publication.tag
        with _asking(repo), tempfile.TemporaryDirectory() as scratch:
            # Otherwise the upload would create a public repository if it finds none.
            with suppress(AlreadyExistsError):
                options = {"visibility": "public", "license": "apache-2.0"}
                self.retry(self.api.create_repo, repo, "model", **options)
            listed = self.retry(self.api.list_repo_files, repo, "model", revision=_BRANCH)
            known, changed = {row.path: row.sha256 for row in listed}, False
            # The client uploads only folders, so copy the files into one.
            for path, content in publication.files.items():
                target = Path(scratch) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                data = content if isinstance(content, bytes) else content.read_bytes()
                target.write_bytes(data)
                changed = changed or known.get(path) != digest(data)
            if changed:
                settings: dict[str, Any] = {"use_cache": False, "disable_tqdm": True}
                settings["commit_message"] = publication.message
                self.retry(self.api.upload_folder, repo, "model", scratch, **settings)
            rows = self.retry(self.api.list_repo_revisions, repo, "model")
            if tag not in {row.get("Revision") or row.get("revision") for row in rows}:
                self.retry(self.api.create_repo_tag, repo, "model", tag, revision=_BRANCH)
        url = tokens.redact(f"{self.endpoint}/models/{repo}/files?revision={tag}")
        return Published(tag, url, changed)
