"""Hugging Face: one commit, or a pull request, on top of a parent that must still be the head."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rotationzoo import __version__
from rotationzoo.errors import HubError, StaleParent, first_sentence
from rotationzoo.hubs.protocol import NETWORK, SPELLING, Hub, Published, patiently

TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


class HuggingFace(Hub):
    name = "huggingface"

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self.api = HfApi(library_name="rotationzoo", library_version=__version__)

    def resolve(self, repo: str, revision: str | None = None) -> str:
        with self._errors(repo, revision):
            return str(patiently(lambda: self.api.model_info(repo, revision=revision).sha, _passing))

    def contents(self, repo: str, revision: str | None = None) -> tuple[str, dict[str, str]]:
        """The commit of a revision, and path -> hash of everything in it: what tells whether a model has changed."""
        with self._errors(repo, revision):
            info = patiently(lambda: self.api.model_info(repo, revision=revision, files_metadata=True), _passing)
        hashes = {s.rfilename: s.lfs.sha256 if s.lfs else s.blob_id or "" for s in info.siblings or []}
        return str(info.sha), hashes

    def list_files(self, repo: str, revision: str | None) -> dict[str, str | None]:
        from huggingface_hub.hf_api import RepoFile

        with self._errors(repo, revision):
            tree = patiently(lambda: list(self.api.list_repo_tree(repo, revision=revision, recursive=True)), _passing)
        return {item.path: item.lfs.sha256 if item.lfs else None for item in tree if isinstance(item, RepoFile)}

    def fetch(self, repo: str, revision: str | None, paths: list[str], folder: Path) -> None:
        with self._errors(repo, revision):
            for path in paths:
                patiently(
                    lambda path=path: self.api.hf_hub_download(repo, path, revision=revision, local_dir=folder),  # type: ignore[misc]
                    _passing,
                )

    def publish(
        self, repo: str, files: Mapping[str, Path | bytes], message: str, parent: str | None, tag: str, create_pr: bool
    ) -> Published:
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.errors import HfHubHTTPError

        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        with self._errors(repo, parent):
            patiently(lambda: self.api.create_repo(repo, exist_ok=True), _passing)
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

            made = patiently(commit, _passing)
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
            raise HubError(f"Hugging Face cannot be reached for {repo}", hint=NETWORK) from error
        except Exception as error:  # the client, its transport and the disk each raise their own
            raise _sentence(error, where, revision) from error


def _sentence(error: Exception, where: str, revision: str | None) -> HubError:
    from huggingface_hub import errors as hf

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hf.RevisionNotFoundError):
        return HubError(f"{where} has no revision {revision}", hint=SPELLING, missing=True)
    if isinstance(error, hf.EntryNotFoundError):
        return HubError(f"{where} has no such file at {revision or 'its head'}", hint=SPELLING, missing=True)
    if isinstance(error, hf.RepositoryNotFoundError) and status != 401:
        return HubError(f"there is no {where}", hint=SPELLING, missing=True)
    if status in (401, 403):
        return HubError(f"{where} refused access", hint="run: hf auth login, or set HF_TOKEN to a token that may write")
    if status is not None:
        return HubError(f"{where} answered {status}", hint=NETWORK)
    if type(error).__module__.split(".")[0] in TRANSPORTS:
        return HubError(f"{where} cannot be reached", hint=NETWORK)
    return HubError(f"{where} cannot be used: {first_sentence(error)}", hint=NETWORK)


def _passing(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 429) or status >= 500
    # Where no connection can be made the clients have tried for long enough.
    return type(error).__module__.split(".")[0] in TRANSPORTS and not type(error).__name__.startswith("Connect")
