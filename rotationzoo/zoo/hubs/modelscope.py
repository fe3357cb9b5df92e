"""The ModelScope hub: files are published in a commit, then tagged to mark them complete."""

import contextlib
import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.network.limits import save_chunks
from rotationzoo.network.tokens import MODELSCOPE_VARIABLE, check_token, redact
from rotationzoo.storage.files import sha256
from rotationzoo.zoo.hubs.modelscope_errors import may_pass, modelscope_errors
from rotationzoo.zoo.hubs.protocol import Hub, ListedFile, Publication, Published
from rotationzoo.zoo.hubs.retry import retry

if TYPE_CHECKING:
    import requests

    from rotationzoo.zoo.hubs.modelscope_session import LimitedAdapter

_BRANCH = "master"
# The client reads these variables when it is imported. Only `retry` repeats calls: the client
# itself would wait silently for minutes, or for half an hour if a hub told it to.
_SETTINGS = {
    "MODELSCOPE_DOWNLOAD_INTRA_CLOUD": "false",  # the probe for an internal network costs 0.2 s
    "MODELSCOPE_UPLOAD_BLOB_MAX_ATTEMPTS": "1",
    "MODELSCOPE_UPLOAD_COMMIT_MAX_ATTEMPTS": "1",
    "MODELSCOPE_UPLOAD_COMMIT_MAX_RETRY_AFTER_SECONDS": "10",
    "MODELSCOPE_UPLOAD_FAILED_FILE_MAX_RETRY_ROUNDS": "1",
    "MODELSCOPE_UPLOAD_RECOVERY_ENABLED": "false",
}


class ModelScope(Hub):
    """ModelScope, accessed through its own client.

    Sets `_SETTINGS` before it imports the client.
    """

    pins_by_tag = True

    def __init__(self) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import requests
        from modelscope_hub import HubApi, HubConfig

        from rotationzoo.zoo.hubs.modelscope_session import LimitedAdapter

        self.token = _read_token()
        # With None, the client would look for a token by itself; with an empty string it does not.
        config = HubConfig(token=self.token or "")
        self.endpoint = str(config.endpoint)
        self.api, self.files = HubApi(config=config), requests.Session()
        self.api.openapi._max_retries = 1
        for client in (self.api.openapi, self.api.legacy):
            for session in (client._session, client._read_session):
                _mount(session, LimitedAdapter(self.endpoint, reads_all=True))
        _mount(self.files, LimitedAdapter(self.endpoint, reads_all=False))
        if not _is_debugging():
            # The client logs every step, and also every failure that it raises anyway.
            logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)

    def resolve(self, repo: str, revision: str | None = None) -> str:
        """The tag, or the branch `master`. ModelScope cannot read from a commit."""
        with modelscope_errors(repo):
            retry(lambda: self.api.get_repo(repo, "model"), may_pass)
        return revision or _BRANCH

    def list_files(self, repo: str, revision: str | None) -> dict[str, ListedFile]:
        with modelscope_errors(repo), _client_output_hidden():
            rows = retry(
                lambda: self.api.list_repo_files(repo, "model", revision=revision or _BRANCH),
                may_pass,
            )
            files = [row for row in rows if row.type != "tree"]
            return {file.path: ListedFile(int(file.size), file.sha256) for file in files}

    def fetch(
        self, repo: str, revision: str | None, sizes: Mapping[str, int], folder: Path
    ) -> None:
        with modelscope_errors(repo), _client_output_hidden():
            for path, size in sizes.items():
                retry(partial(self._save, repo, revision, path, size, folder), may_pass)

    def _save(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        from modelscope_hub.errors import raise_for_status

        from rotationzoo.zoo.hubs.modelscope_session import read_chunks

        url = self.api.legacy.get_download_url(repo, "model", path, revision or _BRANCH)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        cookies = {"m_session_id": self.token} if self.token else None
        with self.files.get(url, headers=headers, cookies=cookies, stream=True) as response:
            raise_for_status(response)
            what = f"{path} of {repo} on ModelScope"
            save_chunks(read_chunks(response), folder / path, size, what)

    def publish(self, publication: Publication) -> Published:
        """Commit to `master`, then add the tag that marks the files as complete.

        ModelScope has no pull requests, so `create_pr` has no effect.
        """
        repo, tag = publication.repo, publication.tag
        with (
            modelscope_errors(repo),
            _client_output_hidden(),
            tempfile.TemporaryDirectory() as scratch,
        ):
            self._create_repository(repo)
            # The client uploads only folders, so copy the files into one.
            for path, content in publication.files.items():
                target = Path(scratch) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                data = content if isinstance(content, bytes) else content.read_bytes()
                target.write_bytes(data)
            changed = self._differs(repo, Path(scratch), publication.files)
            if changed:
                retry(partial(self._upload, repo, scratch, publication.message), may_pass)
            self._create_tag(repo, tag)
        url = redact(f"{self.endpoint}/models/{repo}/files?revision={tag}")
        return Published(tag, url, changed)

    def _create_repository(self, repo: str) -> None:
        """Create the repository unless it exists.

        Otherwise the upload would create a public repository by itself whenever it finds none, for
        whatever reason.
        """
        from modelscope_hub.errors import AlreadyExistsError

        def create() -> None:
            self.api.create_repo(repo, "model", visibility="public", license="apache-2.0")

        with contextlib.suppress(AlreadyExistsError):
            retry(create, may_pass)

    def _differs(self, repo: str, folder: Path, paths: Mapping[str, object]) -> bool:
        listed = self.list_files(repo, _BRANCH)
        known = {path: file.sha256 for path, file in listed.items()}
        return any(known.get(path) != sha256(folder / path) for path in paths)

    def _upload(self, repo: str, folder: str, message: str) -> None:
        self.api.upload_folder(
            repo, "model", folder, commit_message=message, use_cache=False, disable_tqdm=True
        )

    def _create_tag(self, repo: str, tag: str) -> None:
        """Create the tag unless it exists."""
        rows = retry(lambda: self.api.list_repo_revisions(repo, "model"), may_pass)
        tags = {row.get("Revision") or row.get("revision") for row in rows}
        if tag not in tags:
            retry(lambda: self.api.create_repo_tag(repo, "model", tag, revision=_BRANCH), may_pass)


def _mount(session: "requests.Session", adapter: "LimitedAdapter") -> None:
    for scheme in ("https://", "http://"):
        session.mount(scheme, adapter)


def _read_token() -> str | None:
    """The token from the environment, or else the one that `modelscope login` stored."""
    from modelscope_hub import HubConfig

    if MODELSCOPE_VARIABLE in os.environ:
        return check_token(os.environ[MODELSCOPE_VARIABLE], MODELSCOPE_VARIABLE)
    try:
        return check_token(HubConfig().token, "the file that modelscope login wrote")
    except RotationZooError:
        raise
    except Exception as error:  # the client unpickles the file, which may raise anything
        raise HubError(
            "what modelscope login wrote cannot be read",
            hint=f"log in again, or set {MODELSCOPE_VARIABLE}",
        ) from error


def _is_debugging() -> bool:
    return os.environ.get("ROTATIONZOO_DEBUG") == "1"


@contextlib.contextmanager
def _client_output_hidden() -> Iterator[None]:
    """Discard what the client prints. With ROTATIONZOO_DEBUG=1, send it to stderr instead.

    The client prints reports to stdout, which is for results only, and draws its own progress bars.
    """
    if _is_debugging():
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
