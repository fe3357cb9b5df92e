"""Hugging Face: one commit, or a pull request, on top of a parent that must still be the head."""

import itertools
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotationzoo import __version__
from rotationzoo.errors import HubError, StaleParent
from rotationzoo.network.limits import save_chunks
from rotationzoo.network.tokens import huggingface_token
from rotationzoo.zoo.hubs.huggingface_errors import huggingface_errors, may_pass
from rotationzoo.zoo.hubs.protocol import Hub, ListedFile, Publication, Published
from rotationzoo.zoo.hubs.retry import retry

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

_MAX_PULL_REQUESTS = 500  # a hub that lists everybody's must not keep us for hours


class HuggingFace(Hub):
    """The Hugging Face hub, by its own client."""

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self.token = huggingface_token()
        self.api = HfApi(token=self.token, library_name="rotationzoo", library_version=__version__)

    def resolve(self, repo: str, revision: str | None = None) -> str:
        with self._errors(repo, revision):
            info = retry(lambda: self.api.model_info(repo, revision=revision), may_pass)
            return _check_commit(info.sha, repo)

    def contents(self, repo: str, revision: str | None = None) -> tuple[str, dict[str, str]]:
        """The commit of a revision, and path -> hash of every file in it, by which one sees
        whether a model has changed."""
        with self._errors(repo, revision):
            info = self._info(repo, revision)
            hashes = {}
            for file in info.siblings or []:
                hashes[file.rfilename] = file.lfs.sha256 if file.lfs else file.blob_id or ""
            return _check_commit(info.sha, repo), hashes

    def list_files(self, repo: str, revision: str | None) -> dict[str, ListedFile]:
        with self._errors(repo, revision):
            listed = {}
            for file in self._info(repo, revision).siblings or []:
                sha256 = file.lfs.sha256 if file.lfs else None
                listed[file.rfilename] = ListedFile(int(file.size), sha256)
            return listed

    def _info(self, repo: str, revision: str | None) -> Any:
        """The commit and all of its files in one answer. A tree comes in pages, each of which the
        client asks for again and again by itself, for half a minute, where a hub fails."""
        return retry(
            lambda: self.api.model_info(repo, revision=revision, files_metadata=True), may_pass
        )

    def fetch(
        self, repo: str, revision: str | None, sizes: Mapping[str, int], folder: Path
    ) -> None:
        for path, size in sizes.items():
            with self._errors(repo, revision):
                retry(partial(self._save, repo, revision, path, size, folder), may_pass)

    def _save(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        """Download one file by plain HTTP: xet would write whatever it is sent, and how much the
        client downloads is known only afterwards."""
        import huggingface_hub
        from huggingface_hub.utils import (  # type: ignore[attr-defined, unused-ignore]
            build_hf_headers,
            hf_raise_for_status,
        )

        url = huggingface_hub.hf_hub_url(repo, path, revision=revision, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.token or False, library_name="rotationzoo")
        with huggingface_hub.get_session().stream("GET", url, headers=headers) as response:
            hf_raise_for_status(response)
            what = f"{path} of {repo} on Hugging Face"
            save_chunks(response.iter_bytes(), folder / path, size, what)

    def publish(self, publication: Publication) -> Published:
        from huggingface_hub import CommitOperationAdd

        repo, parent = publication.repo, publication.parent
        operations = [
            CommitOperationAdd(path, content) for path, content in publication.files.items()
        ]
        with self._errors(repo, parent):
            retry(lambda: self.api.create_repo(repo, exist_ok=True), may_pass)
            base = parent or self.resolve(repo)
            commit, pull = retry(lambda: self._commit(publication, operations, base), may_pass)
            # A commit that was just made has an `oid`, one of a listing a `commit_id`.
            sha = getattr(commit, "oid", None) or commit.commit_id
            revision = _check_commit(sha, repo)
        url = getattr(commit, "pr_url", None) or f"{self.api.endpoint}/{repo}/tree/{revision}"
        if pull:
            url = pull.url
        return Published(revision, str(url), changed=revision != base)

    def _commit(
        self, publication: Publication, operations: "list[CommitOperationAdd]", base: str
    ) -> tuple[Any, Any]:
        """The commit, and the pull request that it was added to, if there was one already.

        An earlier run, or an attempt whose answer was lost, may have done all of this.
        """
        from huggingface_hub.errors import HfHubHTTPError

        repo, message = publication.repo, publication.message
        pull = self._find_pull_request(publication, base) if publication.create_pr else None
        try:
            commit = self.api.create_commit(
                repo,
                operations,
                commit_message=message,
                revision=pull and pull.git_reference,
                create_pr=publication.create_pr and not pull,
                parent_commit=None if pull else base,
            )
        except HfHubHTTPError as error:
            if error.response.status_code != 412:
                raise
            newest, *older = self.api.list_repo_commits(repo)
            if newest.title == message and older and older[0].commit_id == base:
                return newest, None
            raise StaleParent(f"{repo} has changed since it was looked at") from error
        return commit, pull

    def _find_pull_request(self, publication: Publication, base: str) -> Any:
        """An open pull request of the token's own user, of the same title, made on this base, that
        touches these files alone."""
        from huggingface_hub.errors import HfHubHTTPError

        repo, title = publication.repo, publication.message
        try:
            user = self.api.whoami()["name"]
        except (HfHubHTTPError, KeyError, TypeError):  # a token of a repository has no user
            return None
        pulls = self.api.get_repo_discussions(
            repo, author=user, discussion_type="pull_request", discussion_status="open"
        )
        for pull in itertools.islice(pulls, _MAX_PULL_REQUESTS):
            # Not every hub heeds `author`, so it is looked at again.
            if (pull.author, pull.title) != (user, title):
                continue
            if self._changes_only(repo, pull, base, set(publication.files)):
                return pull
        return None

    def _changes_only(self, repo: str, pull: Any, base: str, paths: set[str]) -> bool:
        """Whether a pull request was made on this base, by its author alone, and changes no other
        files than these."""
        commits = self.api.list_repo_commits(repo, revision=pull.git_reference)
        above = list(itertools.takewhile(lambda commit: commit.commit_id != base, commits))
        if len(above) == len(commits):  # the base is not among them
            return False
        if any({*commit.authors} - {pull.author} for commit in above):
            return False
        _, before = self.contents(repo, base)
        _, after = self.contents(repo, pull.git_reference)
        changed = {path for path in before | after if before.get(path) != after.get(path)}
        return changed <= paths

    def _errors(self, repo: str, revision: str | None) -> AbstractContextManager[None]:
        return huggingface_errors(self.api.endpoint, repo, revision, self.token)


def _check_commit(sha: Any, repo: str) -> str:
    """A commit becomes part of paths and addresses, so it must be 40 hexadecimal digits."""
    if not re.fullmatch(r"[0-9a-f]{40}", str(sha)):
        raise HubError(
            f"{repo} on Hugging Face has no commit that can be read", hint="check HF_ENDPOINT"
        )
    return str(sha)
