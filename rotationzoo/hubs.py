"""Hugging Face and ModelScope behind one small protocol: where the head is, what it holds, fetch, publish.

Clients are imported when they are used. What they retry and what they do not is known from trying every fault against them:
Hugging Face's client does not retry a 503 on a file's body or on a commit, and checks the size of what it fetched, not its
hash. So calls are repeated here, and hashes are checked by the caller.
"""

import contextlib
import io
import logging
import os
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rotationzoo.artifact import sha256
from rotationzoo.errors import HubError, StaleParent, first_sentence

T = TypeVar("T")
_ATTEMPTS = 4
_PAUSE = 1.0  # seconds before the second attempt; doubled each time


@dataclass(frozen=True)
class Published:
    """Where published files are: a revision that does not move, and the page of the commit or pull request."""

    revision: str
    url: str
    changed: bool
    """False if the repository held the very same files already."""


class Hub(ABC):
    """One hub. Every method raises `HubError`, in one sentence, for what the hub or the network refuses."""

    name: str

    @abstractmethod
    def resolve(self, repo: str, revision: str | None = None) -> str:
        """The revision that a branch, tag or None (the newest) stands for, to read from."""

    @abstractmethod
    def list_files(self, repo: str, revision: str | None) -> dict[str, str | None]:
        """Path -> sha256 where the hub tells it, of every file."""

    @abstractmethod
    def fetch(self, repo: str, revision: str | None, paths: list[str], folder: Path) -> None:
        """Download these files into `folder`, under the same paths."""

    @abstractmethod
    def publish(
        self, repo: str, files: Mapping[str, Path | bytes], message: str, parent: str | None, tag: str, create_pr: bool
    ) -> Published:
        """Put files into a repository, made if it is not there, in one step that readers see whole or not at all.

        `parent` is the head that the files were made for: raises `StaleParent` if the repository has moved on since.
        """

    def read(self, repo: str, revision: str | None, path: str) -> bytes | None:
        """One small file, or None if the revision has none of that name."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                self.fetch(repo, revision, [path], Path(scratch))
            except HubError as error:
                if error.missing:
                    return None
                raise
            return (Path(scratch) / path).read_bytes()


class HuggingFace(Hub):
    name = "huggingface"

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self.api = HfApi(library_name="rotationzoo", library_version=version("rotationzoo"))

    def resolve(self, repo: str, revision: str | None = None) -> str:
        with self._errors(repo, revision):
            return str(_patiently(lambda: self.api.model_info(repo, revision=revision).sha, _hf_passing))

    def contents(self, repo: str, revision: str | None = None) -> tuple[str, dict[str, str]]:
        """The commit of a revision, and path -> hash of everything in it: what tells whether a model has changed."""
        with self._errors(repo, revision):
            info = _patiently(lambda: self.api.model_info(repo, revision=revision, files_metadata=True), _hf_passing)
        hashes = {s.rfilename: s.lfs.sha256 if s.lfs else s.blob_id or "" for s in info.siblings or []}
        return str(info.sha), hashes

    def list_files(self, repo: str, revision: str | None) -> dict[str, str | None]:
        from huggingface_hub.hf_api import RepoFile

        with self._errors(repo, revision):
            tree = _patiently(lambda: list(self.api.list_repo_tree(repo, revision=revision, recursive=True)), _hf_passing)
        return {item.path: item.lfs.sha256 if item.lfs else None for item in tree if isinstance(item, RepoFile)}

    def fetch(self, repo: str, revision: str | None, paths: list[str], folder: Path) -> None:
        with self._errors(repo, revision):
            for path in paths:
                _patiently(
                    lambda path=path: self.api.hf_hub_download(repo, path, revision=revision, local_dir=folder),  # type: ignore[misc]
                    _hf_passing,
                )

    def publish(
        self, repo: str, files: Mapping[str, Path | bytes], message: str, parent: str | None, tag: str, create_pr: bool
    ) -> Published:
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.errors import HfHubHTTPError

        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        with self._errors(repo, parent):
            _patiently(lambda: self.api.create_repo(repo, exist_ok=True), _hf_passing)
            base = parent or self.resolve(repo)

            def commit() -> Any:
                ours = self._open_pull(repo, message) if create_pr else None  # of an earlier run, or whose answer was lost
                try:
                    return self.api.create_commit(
                        repo, operations, commit_message=message, revision=ours, create_pr=create_pr and not ours,
                        parent_commit=None if ours else base,
                    )  # fmt: skip
                except HfHubHTTPError as error:
                    if error.response.status_code != 412:
                        raise
                    # The answer to an earlier attempt may have been lost after the commit was made.
                    newest, *older = self.api.list_repo_commits(repo)
                    if newest.title == message and older and older[0].commit_id == base:
                        return newest
                    raise StaleParent(f"{repo} has changed since it was looked at") from error

            made = _patiently(commit, _hf_passing)
        revision = str(getattr(made, "oid", None) or made.commit_id)
        url = getattr(made, "pr_url", None) or f"{self.api.endpoint}/{repo}/tree/{revision}"
        return Published(revision, str(url), changed=revision != base)

    def _open_pull(self, repo: str, title: str) -> str | None:
        """The ref of an open pull request of this title."""
        found = self.api.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open")
        return next((pull.git_reference for pull in found if pull.title == title), None)

    @contextlib.contextmanager
    def _errors(self, repo: str, revision: str | None) -> Iterator[None]:
        from huggingface_hub import errors as hf

        where = f"{repo} on Hugging Face"
        try:
            yield
        except HubError:
            raise
        except (hf.LocalEntryNotFoundError, hf.OfflineModeIsEnabled) as error:
            raise HubError(f"Hugging Face cannot be reached for {repo}", hint=_NETWORK) from error
        except Exception as error:  # the client, its transport and the disk each raise their own
            raise _from_hf(error, where, revision) from error


class ModelScope(Hub):
    name = "modelscope"

    def __init__(self) -> None:
        os.environ.setdefault("MODELSCOPE_DOWNLOAD_INTRA_CLOUD", "false")  # its probe of a cloud's inner network costs 0.2 s
        from modelscope_hub import HubApi, HubConfig

        self.api = HubApi(config=HubConfig())
        if os.environ.get("ROTATIONZOO_DEBUG") != "1":  # it reports every step, and every failure that it then raises
            logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)

    def resolve(self, repo: str, revision: str | None = None) -> str:
        """A tag, or the branch `master`: ModelScope takes no commit."""
        with self._errors(repo, revision):
            _patiently(lambda: self.api.get_repo(repo, "model"), _ms_passing)
        return revision or "master"

    def list_files(self, repo: str, revision: str | None) -> dict[str, str | None]:
        with self._errors(repo, revision), _quietly():
            found = _patiently(lambda: self.api.list_repo_files(repo, "model", revision=revision or "master"), _ms_passing)
        return {file.path: file.sha256 for file in found if file.type != "tree"}

    def fetch(self, repo: str, revision: str | None, paths: list[str], folder: Path) -> None:
        with self._errors(repo, revision), _quietly():
            for path in paths:
                _patiently(
                    lambda path=path: self.api.download_file(  # type: ignore[misc]
                        repo, "model", path, revision=revision or "master", local_dir=folder, force=True
                    ),
                    _ms_passing,
                )

    def publish(
        self, repo: str, files: Mapping[str, Path | bytes], message: str, parent: str | None, tag: str, create_pr: bool
    ) -> Published:
        """Committed to `master`, then tagged: a tag means complete. There are no pull requests here."""
        from modelscope_hub.errors import AlreadyExistsError

        with self._errors(repo, None), _quietly(), tempfile.TemporaryDirectory() as scratch:
            # Its upload would make a missing repository by itself, public, whatever the reason it seems missing.
            with contextlib.suppress(AlreadyExistsError):
                _patiently(lambda: self.api.create_repo(repo, "model", visibility="public", license="apache-2.0"), _ms_passing)
            for path, content in files.items():
                target = Path(scratch) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
            there = self.list_files(repo, "master")
            changed = any(there.get(path) != sha256(Path(scratch) / path) for path in files)
            if changed:
                _patiently(
                    lambda: self.api.upload_folder(
                        repo, "model", scratch, commit_message=message, use_cache=False, disable_tqdm=True
                    ),
                    _ms_passing,
                )
            rows = _patiently(lambda: self.api.list_repo_revisions(repo, "model"), _ms_passing)
            tags = {row.get("Revision") or row.get("revision") for row in rows}
            if tag not in tags:
                _patiently(lambda: self.api.create_repo_tag(repo, "model", tag, revision="master"), _ms_passing)
        return Published(tag, f"https://modelscope.cn/models/{repo}/files?revision={tag}", changed)

    @contextlib.contextmanager
    def _errors(self, repo: str, revision: str | None) -> Iterator[None]:
        from modelscope_hub import errors as ms

        where = f"{repo} on ModelScope"
        try:
            yield
        except HubError:
            raise
        except (ms.NotFoundError, ms.NotExistError) as error:
            raise HubError(f"{where} is not there, or has no such file or revision", hint=_SPELLING, missing=True) from error
        except (ms.AuthenticationError, ms.PermissionDeniedError) as error:
            raise HubError(f"{where} refused access", hint="set MODELSCOPE_API_TOKEN to a token that may write") from error
        except Exception as error:
            raise HubError(f"{where} cannot be used: {first_sentence(error)}", hint=_NETWORK) from error


_NETWORK = "check the network, then run the same command again"
_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_SPELLING = "check the spelling of the repository and the revision"


def hub(name: str) -> Hub:
    return {"huggingface": HuggingFace, "modelscope": ModelScope}[name]()


def _from_hf(error: Exception, where: str, revision: str | None) -> HubError:
    from huggingface_hub import errors as hf

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hf.RevisionNotFoundError):
        return HubError(f"{where} has no revision {revision}", hint=_SPELLING, missing=True)
    if isinstance(error, hf.EntryNotFoundError):
        return HubError(f"{where} has no such file at {revision or 'its head'}", hint=_SPELLING, missing=True)
    if isinstance(error, hf.RepositoryNotFoundError) and status != 401:
        return HubError(f"there is no {where}", hint=_SPELLING, missing=True)
    if status in (401, 403):
        return HubError(f"{where} refused access", hint="run: hf auth login, or set HF_TOKEN to a token that may write")
    if status is not None:
        return HubError(f"{where} answered {status}", hint=_NETWORK)
    if type(error).__module__.split(".")[0] in _TRANSPORTS:
        return HubError(f"{where} cannot be reached", hint=_NETWORK)
    return HubError(f"{where} cannot be used: {first_sentence(error)}", hint=_NETWORK)


def _patiently(call: Callable[[], T], passing: Callable[[Exception], bool]) -> T:
    """Repeat a call whose failure may pass, a few times and more and more slowly."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return call()
        except Exception as error:
            if isinstance(error, HubError) or not passing(error):
                raise
            time.sleep(_PAUSE * 2**attempt)
    return call()


def _hf_passing(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 429) or status >= 500
    return type(error).__module__.split(".")[0] in _TRANSPORTS


def _ms_passing(error: Exception) -> bool:
    from modelscope_hub import errors as ms

    return isinstance(error, ms.NetworkError | ms.ServerError | ms.RateLimitError | ms.RequestTimeoutError | OSError)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The ModelScope client prints its reports to stdout, where only results belong, and draws bars of its own."""
    if os.environ.get("ROTATIONZOO_DEBUG") == "1":
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
