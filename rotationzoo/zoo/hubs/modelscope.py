"""ModelScope: a commit, then a tag that says that it is complete."""

import contextlib
import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from rotationzoo.errors import HubError, RotationZooError, first_sentence
from rotationzoo.network import limits, tokens
from rotationzoo.network.limits import NETWORK
from rotationzoo.storage.files import sha256
from rotationzoo.zoo.hubs.protocol import SPELLING, Hub, Listed, Published, patiently

# What the client reads when it is imported. A call is repeated here, and only here: it would wait
# for minutes, silently, and for half an hour if a hub said so.
_SETTINGS = {
    "MODELSCOPE_DOWNLOAD_INTRA_CLOUD": "false",  # its probe of a cloud's inner network costs 0.2 s
    "MODELSCOPE_UPLOAD_BLOB_MAX_ATTEMPTS": "1",
    "MODELSCOPE_UPLOAD_COMMIT_MAX_ATTEMPTS": "1",
    "MODELSCOPE_UPLOAD_COMMIT_MAX_RETRY_AFTER_SECONDS": "10",
    "MODELSCOPE_UPLOAD_FAILED_FILE_MAX_RETRY_ROUNDS": "1",
    "MODELSCOPE_UPLOAD_RECOVERY_ENABLED": "false",
}


class ModelScope(Hub):
    name = "modelscope"

    def __init__(self) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import requests
        from modelscope_hub import HubApi, HubConfig

        from rotationzoo.zoo.hubs.sessions import Limits

        self.token = self._read_token()
        config = HubConfig(token=self.token or "")  # what is empty is not looked for again
        self.endpoint = str(config.endpoint)
        self.api, self.files = HubApi(config=config), requests.Session()
        self.api.openapi._max_retries = 1
        clients = (self.api.openapi, self.api.legacy)
        sessions = [
            session for client in clients for session in (client._session, client._read_session)
        ]
        for session in (*sessions, self.files):
            for scheme in ("https://", "http://"):
                session.mount(scheme, Limits(self.endpoint, whole=session is not self.files))
        if (
            os.environ.get("ROTATIONZOO_DEBUG") != "1"
        ):  # it reports every step, and every failure that it then raises
            logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)

    def _read_token(self) -> str | None:
        from modelscope_hub import HubConfig

        (name,) = tokens.MODELSCOPE
        if name in os.environ:
            return tokens.check(os.environ[name], name)
        try:
            return tokens.check(HubConfig().token, "the file that modelscope login wrote")
        except RotationZooError:
            raise
        except Exception as error:  # it is unpickled
            raise HubError(
                "what modelscope login wrote cannot be read", hint=f"log in again, or set {name}"
            ) from error

    def resolve(self, repo: str, revision: str | None = None) -> str:
        """A tag, or the branch `master`: ModelScope takes no commit."""
        with self._errors(repo, revision):
            patiently(lambda: self.api.get_repo(repo, "model"), _passing)
        return revision or "master"

    def list_files(self, repo: str, revision: str | None) -> dict[str, Listed]:
        with self._errors(repo, revision), _quietly():
            rows = patiently(
                lambda: self.api.list_repo_files(repo, "model", revision=revision or "master"),
                _passing,
            )
            return {
                row.path: Listed(int(row.size), row.sha256) for row in rows if row.type != "tree"
            }

    def fetch(
        self, repo: str, revision: str | None, sizes: Mapping[str, int], folder: Path
    ) -> None:
        with self._errors(repo, revision), _quietly():
            for path, size in sizes.items():
                patiently(partial(self._save, repo, revision, path, size, folder), _passing)

    def _save(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        from modelscope_hub.errors import raise_for_status

        from rotationzoo.zoo.hubs.sessions import received

        url = self.api.legacy.get_download_url(repo, "model", path, revision or "master")
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        cookies = {"m_session_id": self.token} if self.token else None
        with self.files.get(url, headers=headers, cookies=cookies, stream=True) as response:
            raise_for_status(response)
            limits.save(received(response), folder / path, size, f"{path} of {repo} on ModelScope")

    def publish(
        self,
        repo: str,
        files: Mapping[str, Path | bytes],
        message: str,
        parent: str | None,
        tag: str,
        create_pr: bool,
    ) -> Published:
        """Committed to `master`, then tagged: a tag means complete. There are no pull requests
        here."""
        from modelscope_hub.errors import AlreadyExistsError

        with self._errors(repo, None), _quietly(), tempfile.TemporaryDirectory() as scratch:
            # Its upload would make a missing repository by itself, public, whatever the reason it
            # seems missing.
            with contextlib.suppress(AlreadyExistsError):
                patiently(
                    lambda: self.api.create_repo(
                        repo, "model", visibility="public", license="apache-2.0"
                    ),
                    _passing,
                )
            for path, content in files.items():
                target = Path(scratch) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
            listed = self.list_files(repo, "master")
            known = {path: file.sha256 for path, file in listed.items()}
            changed = any(known.get(path) != sha256(Path(scratch) / path) for path in files)
            if changed:
                patiently(
                    lambda: self.api.upload_folder(
                        repo,
                        "model",
                        scratch,
                        commit_message=message,
                        use_cache=False,
                        disable_tqdm=True,
                    ),
                    _passing,
                )
            rows = patiently(lambda: self.api.list_repo_revisions(repo, "model"), _passing)
            tags = {row.get("Revision") or row.get("revision") for row in rows}
            if tag not in tags:
                patiently(
                    lambda: self.api.create_repo_tag(repo, "model", tag, revision="master"),
                    _passing,
                )
        return Published(tag, f"{self.endpoint}/models/{repo}/files?revision={tag}", changed)

    @contextlib.contextmanager
    def _errors(self, repo: str, revision: str | None) -> Iterator[None]:
        import requests
        from huggingface_hub import constants
        from modelscope_hub import errors as ms

        where = f"{repo} on ModelScope"
        if constants.is_offline_mode():
            raise HubError(
                "HF_HUB_OFFLINE is set: ModelScope is not asked", hint="unset HF_HUB_OFFLINE"
            )
        try:
            yield
        except RotationZooError:
            raise
        except (ms.NotFoundError, ms.NotExistError) as error:
            raise HubError(
                f"{where} is not there, or has no such file or revision",
                hint=SPELLING,
                missing=True,
            ) from error
        except (ms.AuthenticationError, ms.PermissionDeniedError) as error:
            raise HubError(
                f"{where} refused access", hint="set MODELSCOPE_API_TOKEN to a token that may write"
            ) from error
        except ms.APIError as error:
            raise HubError(f"{where} answered {error.status_code}", hint=NETWORK) from error
        except (ms.NetworkError, requests.ConnectionError, requests.Timeout) as error:
            raise HubError(f"{where} broke off its answer", hint=NETWORK) from error
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise HubError(
                f"{where} sent an answer that is none of a hub's",
                hint="check MODELSCOPE_ENDPOINT, and the network's proxy",
            ) from error
        except Exception as error:
            raise HubError(
                f"{where} cannot be used: {first_sentence(error)}", hint=NETWORK
            ) from error


def _passing(error: Exception) -> bool:
    import requests
    from modelscope_hub import errors as ms

    return isinstance(
        error, ms.NetworkError | ms.ServerError | ms.RateLimitError | requests.RequestException
    )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The ModelScope client prints its reports to stdout, where only results belong, and draws bars
    of its own."""
    if os.environ.get("ROTATIONZOO_DEBUG") == "1":
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
