"""The common part of both hubs: repositories, storage for large files, tokens and routes."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit


@dataclass
class Fault:
    """Spoil the next `count` requests of this method whose path with its query matches the pattern.

    `what` is the status of an error, "drop" (no answer), "cut" (half of the body), "flip" (one
    wrong bit in the body), "lost" (the request is carried out without an answer), or the answer.
    """

    method: str
    pattern: str
    what: "int | str | Answer"
    count: int = 1

    def spoils(self, call: "Call") -> bool:
        return call.method == self.method and bool(re.search(self.pattern, call.target))


class Refusal(Exception):
    """An error as an answer, which each hub writes in its own way."""

    def __init__(
        self, status: int, message: str, code: str | int = "", headers: dict[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}


@dataclass
class Call:
    method: str
    target: str  # the path with its query, as sent
    headers: Message
    body: bytes

    def __post_init__(self) -> None:
        address = urlsplit(self.target)
        self.path, self.query = address.path, parse_qs(address.query)

    def option(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(
        status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})}
    )


@dataclass(frozen=True)
class Blob:
    """The content of a file. If it is large, its bytes are in the storage."""

    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        return hashlib.sha1(f"blob {len(self.data)}\0".encode() + self.data).hexdigest()


@dataclass
class Commit:
    files: dict[str, Blob]
    parent: str | None
    title: str
    author: str = ""  # none if the test made it


@dataclass
class Repository:
    name: str
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # "refs/heads/main" and so on
    pulls: list = field(default_factory=list)  # only on Hugging Face

    def find(self, revision: str) -> str | None:
        """The commit of a branch, a tag, a full ref or a commit's name."""
        for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if ref in self.refs:
                return self.refs[ref]
        return revision if revision in self.commits else None

    def add(self, ref: str, parent: str | None, files: dict[str, Blob], title: str) -> str:
        content = [(path, blob.oid) for path, blob in sorted(files.items())]
        # The count tells equal commits apart, and is the same in every run.
        unique = self.name, len(self.commits), parent, content, title
        name = hashlib.sha1(repr(unique).encode()).hexdigest()
        self.commits[name] = Commit(files, parent, title)
        self.refs[ref] = name
        return name


# The patterns of fields in a route; any other field is one segment of the path.
FIELDS = {
    "repository": r"(?:models/)?[\w.-]+/[\w.-]+",
    "revision": r"refs/pr/\d+|[^/]+",
    "path": r".+",
    "number": r"\d+",
    "sha256": r"[0-9a-f]{64}",
}


def route(methods: str, pattern: str, access: str = "read") -> Callable[[Callable], Callable]:
    """Answer these requests with the function. `access` is "read", "write" or "open", which needs
    no token."""
    expression = re.compile(
        re.sub(r"{(\w+)}", lambda name: f"(?P<{name[1]}>{FIELDS.get(name[1], '[^/]+')})", pattern)
    )

    def mark(function: Callable) -> Callable:
        function.route = (methods.split(), expression, access)
        return function

    return mark


class Hub:
    """Repositories in memory. A subclass adds the routes and the wording of one hub."""

    token = "test"
    branch = "main"
    large_suffixes = (".safetensors", ".bin", ".pt", ".pth", ".npz", ".gguf", ".zip", ".parquet")
    # In the first commit of a repository.
    first_files: ClassVar[dict[str, bytes]] = {
        ".gitattributes": "".join(f"*{suffix} filter=lfs\n" for suffix in large_suffixes).encode()
    }
    no_repository: str | int = ""  # the codes in errors
    no_revision: str | int = ""

    def __init__(self) -> None:
        self.endpoint = self.storage_origin = ""  # known once the server runs
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}  # large files by sha256
        self.requests: list[str] = []
        self.leaks: list[str] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()

    def create(self, name: str) -> str:
        with self.lock:
            repository = self.repositories[name] = Repository(name)
            files = {path: self.blob(path, data) for path, data in self.first_files.items()}
            return repository.add(f"refs/heads/{self.branch}", None, files, "initial commit")

    def commit(
        self,
        name: str,
        files: dict[str, bytes],
        delete: Iterable[str] = (),
        branch: str | None = None,
    ) -> str:
        """Change files on a branch. A new branch starts at the default branch."""
        with self.lock:
            repository, branch = self.repositories[name], branch or self.branch
            parent = repository.find(branch) or self.head(name)
            contents = dict(repository.commits[parent].files)
            for path in delete:
                del contents[path]
            contents |= {path: self.blob(path, data) for path, data in files.items()}
            ref = branch if branch.startswith("refs/") else f"refs/heads/{branch}"
            return repository.add(ref, parent, contents, "commit of the test")

    def files(self, name: str, revision: str | None = None) -> dict[str, bytes]:
        with self.lock:
            repository = self.repositories[name]
            contents = repository.commits[self.resolve(repository, revision or self.branch)].files
            return {path: blob.data for path, blob in contents.items()}

    def head(self, name: str) -> str:
        return self.repositories[name].refs[f"refs/heads/{self.branch}"]

    def commits(self, name: str) -> int:
        return len(self.repositories[name].commits)

    def is_large(self, path: str, size: int, start: bytes) -> bool:
        raise NotImplementedError

    def blob(self, path: str, data: bytes) -> Blob:
        large = self.is_large(path, len(data), data[:512])
        if large:
            self.storage[hashlib.sha256(data).hexdigest()] = data
        return Blob(data, large)

    def stored(self, sha256: str) -> Blob:
        return Blob(self.storage[sha256], True)

    def resolve(self, repository: Repository, revision: str) -> str:
        found = repository.find(revision)
        if found is None:
            raise Refusal(404, f"No such revision: {revision}", self.no_revision)
        return found

    def listing(self, files: dict[str, Blob], folder: str = "") -> dict[str, Blob]:
        """All files below a folder."""
        return {path: blob for path, blob in sorted(files.items()) if path.startswith(folder)}

    def stored_at(self, path: str, sha256: str) -> dict[str, str]:
        """The redirect to a large file at another origin, like a CDN. The pattern of a fault may
        match the name."""
        return {"Location": f"{self.storage_origin}/storage/{sha256}?name={quote(path)}"}

    @route("PUT", "/storage/{sha256}", access="open")
    def store(self, call: Call, sha256: str) -> Answer:
        assert hashlib.sha256(call.body).hexdigest() == sha256
        self.storage[sha256] = call.body
        return Answer()

    @route("GET HEAD", "/storage/{sha256}", access="open")
    def fetch(self, call: Call, sha256: str) -> Answer:
        tags = {"ETag": f'"{sha256}"', "X-Linked-ETag": f'"{sha256}"'}
        return Answer(200, self.storage[sha256], tags)

    def credential(self, call: Call) -> str | None:
        """The token of a call."""
        header = call.headers.get("Authorization")
        return header.removeprefix("Bearer ") if header else None

    def refused(self, refusal: Refusal) -> Answer:
        raise NotImplementedError

    def record(self, call: Call) -> Fault | None:
        """Record a call, and find the fault for it."""
        with self.lock:
            line = f"{call.method} {call.target}"
            self.requests.append(line)
            at_storage = call.headers.get("Host") == urlsplit(self.storage_origin).netloc
            if at_storage and self.token in str(call.headers):
                self.leaks.append(line)
            for fault in self.faults:
                if fault.count > 0 and fault.spoils(call):
                    fault.count -= 1
                    return fault
        return None

    def answer(self, call: Call) -> Answer:
        try:
            with self.lock:
                return self.dispatch(call)
        except Refusal as refusal:
            return self.refused(refusal)

    def dispatch(self, call: Call) -> Answer:
        # No two routes match the same request, so their order does not matter.
        for function in (getattr(self, name) for name in dir(type(self))):
            methods, expression, access = getattr(function, "route", ((), None, ""))
            if call.method in methods and (match := expression.fullmatch(call.path)):
                break
        else:
            raise Refusal(404, f"No route for {call.method} {call.path}")
        values: dict[str, Any] = {
            key: unquote(value) for key, value in match.groupdict().items() if value is not None
        }
        repository = self.repositories.get(values.get("repository", "").removeprefix("models/"))
        credential = self.credential(call)
        if access != "open" and credential not in (None, self.token):
            raise Refusal(401, "Invalid credentials in Authorization header")
        if credential is None and access == "write":
            raise Refusal(401, "A token is needed here")
        if "repository" in values:
            if repository is None:
                raise Refusal(404, "No such repository", self.no_repository)
            values["repository"] = repository
            if "revision" in values:  # the function gets the commit
                values["revision"] = self.resolve(repository, values["revision"])
        return function(call, **values)
