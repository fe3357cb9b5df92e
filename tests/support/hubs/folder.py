"""A third hub, which keeps its repositories in the folder `hub`: all that a new hub takes is a
module like this one and a row in the table of hubs.

Run as a program it is the command line of rotationzoo with that row.
"""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rotationzoo.errors import HubError
from rotationzoo.zoo.hubs import protocol
from rotationzoo.zoo.hubs.protocol import Hub, Publication, Published

ROOT = Path("hub")


class FolderHub(Hub):
    pins_by_tag = True

    def folder(self, repo: str, revision: str | None) -> Path:
        folder = ROOT / repo / (revision or "newest")
        if not folder.is_dir():
            raise HubError(f"there is no {repo} in {ROOT}", missing=True)
        return folder

    def resolve(self, repo: str) -> str:
        self.folder(repo, None)
        return "newest"

    def list_files(self, repo: str, revision: str | None) -> dict[str, int]:
        folder = self.folder(repo, revision)
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}

    def fetch(
        self, repo: str, revision: str | None, sizes: Mapping[str, int], folder: Path
    ) -> None:
        for path in sizes:
            source = self.folder(repo, revision) / path
            if not source.is_file():
                raise HubError(f"there is no {path} in {repo}", missing=True)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / path)

    def publish(self, publication: Publication) -> Published:
        for revision in ("newest", publication.tag):
            for path, content in publication.files.items():
                target = ROOT / publication.repo / revision / path
                target.parent.mkdir(parents=True, exist_ok=True)
                data = content if isinstance(content, bytes) else content.read_bytes()
                target.write_bytes(data)
        return Published(publication.tag, str(ROOT / publication.repo), changed=True)


def register() -> None:
    """Add the row, as if it stood in the table; nothing else has imported that module yet."""
    sys.modules["rotationzoo.zoo.hubs.folder"] = sys.modules[__name__]
    file = "https://folder.example/{repo}/{revision}/{path}"
    protocol.HUBS["folder"] = protocol.HubEntry(
        title="Folder",
        abbreviation="fo",
        class_name="FolderHub",
        main="main",
        repo_page="https://folder.example/{repo}",
        file_page=file,
        file=file,
    )
    protocol.HUB_NAMES = tuple(protocol.HUBS)
    protocol.HubName = Literal[protocol.HUB_NAMES]


if __name__ == "__main__":
    register()
    from rotationzoo.cli.app import app

    app()
