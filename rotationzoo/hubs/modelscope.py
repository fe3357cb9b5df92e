"""ModelScope: a commit, then a tag that says that it is complete."""

import contextlib
import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rotationzoo.artifact import sha256
from rotationzoo.errors import HubError, first_sentence
from rotationzoo.hubs.protocol import NETWORK, SPELLING, Hub, Published, patiently


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
            patiently(lambda: self.api.get_repo(repo, "model"), _passing)
        return revision or "master"

    def list_files(self, repo: str, revision: str | None) -> dict[str, str | None]:
        with self._errors(repo, revision), _quietly():
            found = patiently(lambda: self.api.list_repo_files(repo, "model", revision=revision or "master"), _passing)
        return {file.path: file.sha256 for file in found if file.type != "tree"}

    def fetch(self, repo: str, revision: str | None, paths: list[str], folder: Path) -> None:
        with self._errors(repo, revision), _quietly():
            for path in paths:
                patiently(
                    lambda path=path: self.api.download_file(  # type: ignore[misc]
                        repo, "model", path, revision=revision or "master", local_dir=folder, force=True
                    ),
                    _passing,
                )

    def publish(
        self, repo: str, files: Mapping[str, Path | bytes], message: str, parent: str | None, tag: str, create_pr: bool
    ) -> Published:
        """Committed to `master`, then tagged: a tag means complete. There are no pull requests here."""
        from modelscope_hub.errors import AlreadyExistsError

        with self._errors(repo, None), _quietly(), tempfile.TemporaryDirectory() as scratch:
            # Its upload would make a missing repository by itself, public, whatever the reason it seems missing.
            with contextlib.suppress(AlreadyExistsError):
                patiently(lambda: self.api.create_repo(repo, "model", visibility="public", license="apache-2.0"), _passing)
            for path, content in files.items():
                target = Path(scratch) / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
            there = self.list_files(repo, "master")
            changed = any(there.get(path) != sha256(Path(scratch) / path) for path in files)
            if changed:
                patiently(
                    lambda: self.api.upload_folder(
                        repo, "model", scratch, commit_message=message, use_cache=False, disable_tqdm=True
                    ),
                    _passing,
                )
            rows = patiently(lambda: self.api.list_repo_revisions(repo, "model"), _passing)
            tags = {row.get("Revision") or row.get("revision") for row in rows}
            if tag not in tags:
                patiently(lambda: self.api.create_repo_tag(repo, "model", tag, revision="master"), _passing)
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
            raise HubError(f"{where} is not there, or has no such file or revision", hint=SPELLING, missing=True) from error
        except (ms.AuthenticationError, ms.PermissionDeniedError) as error:
            raise HubError(f"{where} refused access", hint="set MODELSCOPE_API_TOKEN to a token that may write") from error
        except Exception as error:
            raise HubError(f"{where} cannot be used: {first_sentence(error)}", hint=NETWORK) from error


def _passing(error: Exception) -> bool:
    from modelscope_hub import errors as ms

    if "NewConnectionError" in str(error) or "NameResolutionError" in str(error):
        return False  # where no connection can be made the client has tried for long enough
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
