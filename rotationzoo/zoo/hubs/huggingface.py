"""Hugging Face: one commit, or a pull request, on top of a parent that must still be the head."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rotationzoo import __version__
from rotationzoo.errors import HubError, RotationZooError, StaleParent, first_sentence
from rotationzoo.network import limits, tokens
from rotationzoo.network.limits import NETWORK
from rotationzoo.zoo.hubs.protocol import SPELLING, Hub, Listed, Published, patiently

TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_PULLS = 500


class HuggingFace(Hub):
    name = "huggingface"

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        self.token = tokens.huggingface()
        self.api = HfApi(token=self.token, library_name="rotationzoo", library_version=__version__)

    def resolve(self, repo: str, revision: str | None = None) -> str:
        with self._errors(repo, revision):
            return self._commit(
                patiently(lambda: self.api.model_info(repo, revision=revision).sha, _passing), repo
            )

    def contents(self, repo: str, revision: str | None = None) -> tuple[str, dict[str, str]]:
        """The commit of a revision, and path -> hash of everything in it: what tells whether a
        model has changed."""
        with self._errors(repo, revision):
            info = self._info(repo, revision)
            hashes = {
                s.rfilename: s.lfs.sha256 if s.lfs else s.blob_id or "" for s in info.siblings or []
            }
            return self._commit(info.sha, repo), hashes

    def list_files(self, repo: str, revision: str | None) -> dict[str, Listed]:
        with self._errors(repo, revision):
            files = self._info(repo, revision).siblings or []
            return {
                file.rfilename: Listed(int(file.size), file.lfs.sha256 if file.lfs else None)
                for file in files
            }

    def _info(self, repo: str, revision: str | None) -> Any:
        """The commit and all of its files in one answer. A tree comes in pages, which the client
        asks for again and again by itself, for half a minute, where a hub fails."""
        return patiently(
            lambda: self.api.model_info(repo, revision=revision, files_metadata=True), _passing
        )

    def fetch(
        self, repo: str, revision: str | None, sizes: Mapping[str, int], folder: Path
    ) -> None:
        for path, size in sizes.items():
            with self._errors(repo, revision):
                patiently(partial(self._save, repo, revision, path, size, folder), _passing)

    def _save(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        """By plain HTTP: xet would write whatever it is sent, and what the client downloads is
        known only afterwards."""
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        url = huggingface_hub.hf_hub_url(repo, path, revision=revision, endpoint=self.api.endpoint)
        headers = build_hf_headers(token=self.token or False, library_name="rotationzoo")
        with huggingface_hub.get_session().stream("GET", url, headers=headers) as response:
            hf_raise_for_status(response)
            limits.save(
                response.iter_bytes(), folder / path, size, f"{path} of {repo} on Hugging Face"
            )

    def publish(
        self,
        repo: str,
        files: Mapping[str, Path | bytes],
        message: str,
        parent: str | None,
        tag: str,
        create_pr: bool,
    ) -> Published:
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.errors import HfHubHTTPError

        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        with self._errors(repo, parent):
            patiently(lambda: self.api.create_repo(repo, exist_ok=True), _passing)
            base = parent or self.resolve(repo)

            def commit() -> tuple[Any, Any]:
                # Of an earlier run, or one whose answer was lost.
                ours = self._open_pull(repo, message, base, set(files)) if create_pr else None
                try:
                    made = self.api.create_commit(
                        repo, operations, commit_message=message, revision=ours and ours.git_reference,
                        create_pr=create_pr and not ours, parent_commit=None if ours else base,
                    )  # fmt: skip
                except HfHubHTTPError as error:
                    if error.response.status_code != 412:
                        raise
                    # The answer to an earlier attempt may have been lost after the commit was made.
                    newest, *older = self.api.list_repo_commits(repo)
                    if newest.title == message and older and older[0].commit_id == base:
                        return newest, None
                    raise StaleParent(f"{repo} has changed since it was looked at") from error
                return made, ours

            made, ours = patiently(commit, _passing)
            revision = self._commit(getattr(made, "oid", None) or made.commit_id, repo)
        url = getattr(made, "pr_url", None) or f"{self.api.endpoint}/{repo}/tree/{revision}"
        return Published(revision, str(ours.url if ours else url), changed=revision != base)

    def _open_pull(self, repo: str, title: str, base: str, paths: set[str]) -> Any:
        """An open pull request of the token's own user, of this title, made on this base, that
        touches these files alone."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            user = self.api.whoami()["name"]
        except (HfHubHTTPError, KeyError, TypeError):  # a token of a repository, which is nobody's
            return None
        pulls = self.api.get_repo_discussions(
            repo, author=user, discussion_type="pull_request", discussion_status="open"
        )
        for pull in itertools.islice(pulls, _PULLS):
            if (pull.author, pull.title) == (user, title) and self._is_ours(
                repo, pull, base, paths
            ):
                return pull
        return None

    def _is_ours(self, repo: str, pull: Any, base: str, paths: set[str]) -> bool:
        commits = self.api.list_repo_commits(repo, revision=pull.git_reference)
        above = list(itertools.takewhile(lambda commit: commit.commit_id != base, commits))
        if len(above) == len(commits) or any({*commit.authors} - {pull.author} for commit in above):
            return False
        before, after = (
            self.contents(repo, revision)[1] for revision in (base, pull.git_reference)
        )
        return {path for path in before | after if before.get(path) != after.get(path)} <= paths

    def _commit(self, sha: Any, repo: str) -> str:
        """A commit becomes part of paths and addresses: nothing but its digits may."""
        if not re.fullmatch(r"[0-9a-f]{40}", str(sha)):
            raise HubError(
                f"{repo} on Hugging Face has no commit that can be read", hint="check HF_ENDPOINT"
            )
        return str(sha)

    @contextlib.contextmanager
    def _errors(self, repo: str, revision: str | None) -> Iterator[None]:
        from huggingface_hub import constants
        from huggingface_hub import errors as hf

        try:
            with limits.asking_huggingface(self.api.endpoint, repeated=True):
                yield
        except RotationZooError:
            raise
        except (hf.LocalEntryNotFoundError, hf.OfflineModeIsEnabled) as error:
            if constants.is_offline_mode():
                raise HubError(
                    "HF_HUB_OFFLINE is set: Hugging Face is not asked", hint="unset HF_HUB_OFFLINE"
                ) from error
            raise HubError(
                f"{repo} on Hugging Face cannot be reached ({_reason(error)})", hint=NETWORK
            ) from error
        except Exception as error:  # the client, its transport and the disk each raise their own
            raise _sentence(error, f"{repo} on Hugging Face", revision, self.token) from error


def _reason(error: Exception) -> str:
    return first_sentence(error).partition(": ")[2] or first_sentence(error)


def _sentence(error: Exception, where: str, revision: str | None, token: str | None) -> HubError:
    from huggingface_hub import errors as hf

    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "run: hf auth login, or set HF_TOKEN to a token that may read and write there"
    if isinstance(error, hf.RevisionNotFoundError):
        return HubError(f"{where} has no revision {revision}", hint=SPELLING, missing=True)
    if isinstance(error, hf.EntryNotFoundError):
        return HubError(
            f"{where} has no such file at {revision or 'its head'}", hint=SPELLING, missing=True
        )
    if isinstance(error, hf.RepositoryNotFoundError) and status == 404:
        return HubError(f"there is no {where}", hint=SPELLING, missing=True)
    if isinstance(error, hf.RepositoryNotFoundError) and token is None:
        return HubError(
            f"{where} does not exist, or is private", hint=f"{SPELLING}; or {login}", hidden=True
        )
    if status in (401, 403):
        return HubError(f"{where} refused access", hint=login)
    if status is not None:
        return HubError(f"{where} answered {status}", hint=NETWORK)
    if isinstance(error, limits.BrokenAnswer) or type(error).__module__.split(".")[0] in TRANSPORTS:
        return HubError(
            f"{where} broke off its answer ({type(error.__cause__ or error).__name__})",
            hint=NETWORK,
        )
    if isinstance(error, OSError):
        return HubError(
            f"{where} cannot be used: {error.strerror or first_sentence(error)}", hint=NETWORK
        )
    if isinstance(
        error,
        json.JSONDecodeError
        | UnicodeDecodeError
        | RecursionError
        | KeyError
        | TypeError
        | AttributeError,
    ):
        return HubError(
            f"{where} sent an answer that is none of a hub's",
            hint="check HF_ENDPOINT, and the network's proxy",
        )
    return HubError(f"{where} cannot be used: {first_sentence(error)}", hint=NETWORK)


def _passing(error: Exception) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, limits.BrokenAnswer):
        return True
    # Where no connection can be made, or nothing more comes, it has been waited for long enough.
    lasts = type(error).__name__.startswith(("Connect", "ReadTimeout"))
    return type(error).__module__.split(".")[0] in TRANSPORTS and not lasts
