"""A repository in memory: files, commits, and what points at them."""

import hashlib
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Blob:
    """The content of a file. Git holds a large one as a pointer only; its bytes are in the
    storage."""

    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def pointer(self) -> bytes:
        lines = [
            "version https://git-lfs.github.com/spec/v1",
            f"oid sha256:{self.sha256}",
            f"size {len(self.data)}",
            "",
        ]
        return "\n".join(lines).encode()

    @property
    def oid(self) -> str:
        content = self.pointer if self.large else self.data
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@dataclass
class Commit:
    files: dict[str, Blob]
    parent: str | None
    title: str
    description: str
    seconds: float = field(default_factory=time.time)
    author: str = ""  # nobody's where the test made it

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.seconds))


@dataclass
class Repository:
    name: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # "refs/heads/main" and so on
    pulls: list = field(default_factory=list)  # only Hugging Face has them

    def find(self, revision: str) -> str | None:
        """The commit that a branch, a tag, a full ref or the start of a commit's name stands
        for."""
        for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if ref in self.refs:
                return self.refs[ref]
        found = [name for name in self.commits if len(revision) >= 7 and name.startswith(revision)]
        return found[0] if len(found) == 1 else None

    def add(
        self,
        ref: str,
        parent: str | None,
        files: dict[str, Blob],
        title: str,
        description: str = "",
    ) -> str:
        content = [(path, blob.oid) for path, blob in sorted(files.items())]
        # The count tells commits apart that have everything else in common, and unlike a clock it
        # repeats in every run.
        name = hashlib.sha1(
            repr((self.name, len(self.commits), parent, content, title)).encode()
        ).hexdigest()
        self.commits[name] = Commit(files, parent, title, description)
        self.refs[ref] = name
        return name
