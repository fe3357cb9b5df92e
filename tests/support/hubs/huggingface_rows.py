"""How Hugging Face writes files, folders and pull requests in its answers."""

from dataclasses import dataclass

from support.hubs.repository import Blob, Repository


@dataclass
class PullRequest:
    number: int
    title: str
    base: str  # the commit that it started from, which says what it changes
    status: str = "draft"  # as the real hub opens those that come through the API
    merged: str | None = None
    author: str = "tester"

    @property
    def ref(self) -> str:
        return f"refs/pr/{self.number}"


def as_entry(path: str, blob: Blob) -> dict:
    """A file as trees list it."""
    entry = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid}
    if blob.large:
        entry["lfs"] = {
            "oid": blob.sha256,
            "size": len(blob.data),
            "pointerSize": len(blob.pointer),
        }
    return entry


def as_folder(path: str) -> dict:
    return {"type": "directory", "path": path, "size": 0, "oid": Blob(path.encode(), False).oid}


def as_sibling(path: str, blob: Blob, blobs: bool) -> dict:
    """A file as the description of a repository lists it."""
    sibling = {"rfilename": path}
    if blobs:
        sibling |= {"size": len(blob.data), "blobId": blob.oid}
        if blob.large:
            sibling["lfs"] = {
                "sha256": blob.sha256,
                "size": len(blob.data),
                "pointerSize": len(blob.pointer),
            }
    return sibling


def as_discussion(repository: Repository, pull: PullRequest) -> dict:
    name = repository.name.removeprefix("datasets/")
    return {
        "num": pull.number,
        "title": pull.title,
        "status": pull.status,
        "author": {"name": pull.author},
        "isPullRequest": True,
        "createdAt": repository.commits[pull.base].date,
        "repo": {"name": name, "type": "model" if name == repository.name else "dataset"},
    }
