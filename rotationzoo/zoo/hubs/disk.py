"""A folder that serves as a hub, for example on machines without a network. Files are replaced
atomically one by one, the index after the files that it lists."""

import os
from pathlib import Path

from rotationzoo.errors import HubError, StaleParent
from rotationzoo.network.limits import ANSWER_BYTES
from rotationzoo.storage import files, folders
from rotationzoo.storage.files import disk_errors
from rotationzoo.storage.folders import locked
from rotationzoo.zoo.hubs.protocol import SPELLING_HINT, Hub, Publication, Published
from rotationzoo.zoo.index import NAME, ROOT_FILES


class Disk(Hub):
    """Folders, named by their paths. They keep only the newest revision, which is named by the
    sha256 of its index. `create_pr` has no effect."""

    def resolve(self, repo: str) -> str:
        return files.digest(files.read(_find(repo, NAME), ANSWER_BYTES))[:12]

    def fetch(self, repo: str, revision: str | None, path: str, size: int, folder: Path) -> None:
        folders.replace_file(folder / path, files.read(_find(repo, path), size))

    def publish(self, publication: Publication) -> Published:
        repo, root = publication.repo, Path(publication.repo).expanduser()
        with disk_errors(root, "name another folder"), locked(root / ".lock", f"writing {root}"):
            taken = [name for name in ROOT_FILES if os.path.lexists(root / name)]
            if taken and NAME not in taken:
                raise HubError(f"{repo} is not a zoo and has a {taken[0]}", "name a new folder")
            if taken and self.resolve(repo) != publication.parent:
                raise StaleParent(f"{repo} has changed since it was read")
            for path, content in publication.files.items():  # the index after what it lists
                data = content if isinstance(content, bytes) else content.read_bytes()
                folders.replace_file(files.child(root, path), data)
            revision = self.resolve(repo)
        return Published(revision, str(root), changed=revision != publication.parent)


def _find(repo: str, path: str) -> Path:
    file = files.child(Path(repo).expanduser(), path)
    if files.size_of(file) is None:
        raise HubError(f"{repo} has no {path}", hint=SPELLING_HINT, missing=True)
    return file
