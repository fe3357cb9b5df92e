"""The Hugging Face hub: files are published in one commit, or in a pull request. The parent of the
commit must still be the head, so that no other commit is overwritten."""

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rotationzoo import __version__
from rotationzoo.errors import HubError, RotationZooError, StaleParent, first_sentence
from rotationzoo.network import huggingface_session as session
from rotationzoo.network import limits, tokens
from rotationzoo.zoo.hubs.protocol import SPELLING_HINT, Hub, Publication, Published

_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_LOGIN_HINT = "run: hf auth login, or set HF_TOKEN to a token that may read and write there"
_MAX_PULL_REQUESTS = 500  # in case a hub ignores `author` and lists all of them
# The client raises these when it parses an answer that no real hub would send.
_BAD_JSON = json.JSONDecodeError, UnicodeDecodeError, RecursionError
_UNREADABLE = *_BAD_JSON, KeyError, TypeError, AttributeError


def _as_hub_error(
    error: Exception, where: str, revision: str | None, token: str | None
) -> HubError:
    from huggingface_hub import errors as client_errors

    status, hint = session.status_of(error), limits.NETWORK_HINT
    is_repository = isinstance(error, client_errors.RepositoryNotFoundError)
    if isinstance(error, client_errors.RevisionNotFoundError):
        says, hint = f"{where} has no revision {revision}", SPELLING_HINT
    elif isinstance(error, client_errors.EntryNotFoundError):
        says, hint = f"{where} has no such file at {revision or 'its head'}", SPELLING_HINT
    elif is_repository and status == 404:
        says, hint = f"there is no {where}", SPELLING_HINT
    elif is_repository and token is None:
        # Without a token, Hugging Face gives the same answer for missing and private repositories.
        hint = f"{SPELLING_HINT}; or {_LOGIN_HINT}"
        return HubError(f"{where} does not exist, or is private", hint=hint, hidden=True)
    elif status in (401, 403):
        says, hint = f"{where} refused access", _LOGIN_HINT
    elif status is not None:
        says = f"{where} answered {status}"
    elif isinstance(error, session.BrokenAnswer) or _is_of_transport(error):
        says = f"{where} closed the connection early ({type(error.__cause__ or error).__name__})"
    elif isinstance(error, OSError):
        says = f"{where} cannot be used: {error.strerror or first_sentence(error)}"
    elif isinstance(error, _UNREADABLE):
        says = f"{where} sent an invalid answer"
        hint = "check HF_ENDPOINT, and the network's proxy"
    else:
        says = f"{where} cannot be used: {first_sentence(error)}"
    return HubError(says, hint=hint, missing=hint == SPELLING_HINT)


def _is_of_transport(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in _TRANSPORTS


class HuggingFace(Hub):
    """The Hugging Face hub, through its own client."""

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self.token = tokens.huggingface_token()
        self.api = HfApi(token=self.token, library_name="rotationzoo", library_version=__version__)

    @staticmethod
    def may_pass(error: Exception) -> bool:
        status = session.status_of(error)
        if status is not None:
            return session.is_temporary(status)
        # A failure to connect has already used up the time limit of a call.
        has_waited = type(error).__name__.startswith(("Connect", "ReadTimeout"))
        is_broken = isinstance(error, session.BrokenAnswer)
        return is_broken or (_is_of_transport(error) and not has_waited)

    def resolve(self, repo: str) -> str:
        with self._errors(repo, None):
            return _check_commit(self.retry(self.api.model_info, repo).sha, repo)

    def contents(self, repo: str, revision: str | None = None) -> tuple[str, dict[str, str]]:
        """The commit of a revision, and path -> hash of each of its files."""
        with self._errors(repo, revision):
            # The client's own listing would retry each page for half a minute when the hub fails.
            info = self.retry(self.api.model_info, repo, revision=revision, files_metadata=True)
            hashes = {}
            for file in info.siblings or []:
                hashes[file.rfilename] = file.lfs.sha256 if file.lfs else file.blob_id or ""
            return _check_commit(info.sha, repo), hashes

    def fetch(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        with self._errors(repo, revision):
            self.retry(self._save, repo, revision, path, size, folder)

    def _save(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        """Download a file by plain HTTP: the client's own download has no limits."""
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = huggingface_hub.hf_hub_url(repo, path, revision=revision, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.token or False, library_name="rotationzoo")
        with huggingface_hub.get_session().stream("GET", url, headers=headers) as response:
            hf_raise_for_status(response)
            what = f"{path} of {repo} on Hugging Face"
            chunks, told = response.iter_bytes(), response.headers
            limits.save_chunks(chunks, folder / path, size, what, told)

    def publish(self, publication: Publication) -> Published:
        from huggingface_hub import CommitOperationAdd

        repo, parent = publication.repo, publication.parent
        operations = list(itertools.starmap(CommitOperationAdd, publication.files.items()))
        with self._errors(repo, parent):
            self.retry(self.api.create_repo, repo, exist_ok=True)
            base = parent or self.resolve(repo)
            commit, pull = self.retry(self._commit, publication, operations, base)
            # A new commit has an `oid`, and one from a listing a `commit_id`.
            sha = getattr(commit, "oid", None) or commit.commit_id
            revision = _check_commit(sha, repo)
        page = pull.url if pull else getattr(commit, "pr_url", None)
        url = page or f"{self.api.endpoint}/{repo}/tree/{revision}"
        return Published(revision, tokens.redact(str(url)), changed=revision != base)

    def _commit(
        self, publication: Publication, operations: list[Any], base: str
    ) -> tuple[Any, Any]:
        """The commit, and the open pull request that it was added to, if any: one from an earlier
        run or a lost answer. Raises `StaleParent` if the head is no longer `base`."""
        from huggingface_hub.errors import HfHubHTTPError

        repo, message = publication.repo, publication.message
        pull = self._find_pull_request(publication, base) if publication.create_pr else None
        target: dict[str, Any] = {"create_pr": publication.create_pr, "parent_commit": base}
        if pull:
            target = {"revision": pull.git_reference}
        try:
            commit = self.api.create_commit(repo, operations, commit_message=message, **target)
        except HfHubHTTPError as error:
            if error.response.status_code != 412:  # 412: the head is no longer `base`
                raise
            # The new head may be our own commit, whose answer was lost.
            newest, *older = self.api.list_repo_commits(repo)
            if newest.title == message and older and older[0].commit_id == base:
                return newest, None
            raise StaleParent(f"{repo} has changed since it was read") from error
        return commit, pull

    def _find_pull_request(self, publication: Publication, base: str) -> Any:
        """An open pull request that this publication may continue, or None. It must be by this
        token's user alone, with the same title and base, and no other files."""
        from huggingface_hub.errors import HfHubHTTPError

        repo = publication.repo
        try:
            user = self.api.whoami()["name"]
        except (HfHubHTTPError, KeyError, TypeError):  # a repository's token has no user
            return None
        pulls = self.api.get_repo_discussions(
            repo, author=user, discussion_type="pull_request", discussion_status="open"
        )
        for pull in itertools.islice(pulls, _MAX_PULL_REQUESTS):
            # Check the author again: some hubs ignore it in the query.
            if (pull.author, pull.title) != (user, publication.message):
                continue
            commits = self.api.list_repo_commits(repo, revision=pull.git_reference)
            above = list(itertools.takewhile(lambda commit: commit.commit_id != base, commits))
            authors = {author for commit in above for author in commit.authors}
            _, before = self.contents(repo, base)
            _, after = self.contents(repo, pull.git_reference)
            changed = {path for path, _ in before.items() ^ after.items()}
            stands_on_base = len(above) < len(commits)
            if stands_on_base and authors <= {user} and changed <= publication.files.keys():
                return pull
        return None

    @contextmanager
    def _errors(self, repo: str, revision: str | None) -> Iterator[None]:
        """Turn failures into a `RotationZooError`, and send the token only to the endpoint."""
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

        where = f"{repo} on Hugging Face"
        try:
            with session.asking_huggingface(self.api.endpoint, retries=True):
                yield
        except RotationZooError:
            raise
        except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            hint = "check HF_HUB_OFFLINE and the network, then run the same command again"
            failure = session.describe_failure(error)
            raise HubError(f"{where}: {failure}", hint=hint) from error
        except Exception as error:  # the client, its transport and the disk raise their own types
            raise _as_hub_error(error, where, revision, self.token) from error


def _check_commit(sha: Any, repo: str) -> str:
    """The commit, which becomes part of paths and URLs. Raises `HubError` unless it is a sha1."""
    if not re.fullmatch(r"[0-9a-f]{40}", str(sha)):
        raise HubError(f"{repo} on Hugging Face has no valid commit", "check HF_ENDPOINT")
    return str(sha)
