"""A Hugging Face Hub in memory, without xet, for `huggingface_hub`."""

import base64
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass

from support.hubs.hub import Answer, Blob, Call, Hub, Refusal, Repository, as_json, route
from support.hubs.server import running

DATE = "2026-01-01T00:00:00.000Z"  # of everything


@dataclass
class PullRequest:
    number: int
    title: str
    base: str  # the commit that it started from
    status: str = "draft"  # as the real hub opens those from the API
    author: str = "tester"

    @property
    def ref(self) -> str:
        return f"refs/pr/{self.number}"


def as_entry(path: str, blob: Blob) -> dict:
    """A file in a tree."""
    entry = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid}
    if blob.large:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 134}
    return entry


def as_sibling(path: str, blob: Blob, blobs: bool) -> dict:
    """A file in the description of a repository."""
    sibling = {"rfilename": path}
    if blobs:
        sibling |= {"size": len(blob.data), "blobId": blob.oid}
        if blob.large:
            sibling["lfs"] = {"sha256": blob.sha256, "size": len(blob.data), "pointerSize": 134}
    return sibling


def as_discussion(repository: Repository, pull: PullRequest) -> dict:
    return {
        "num": pull.number,
        "title": pull.title,
        "status": pull.status,
        "author": {"name": pull.author},
        "isPullRequest": True,
        "createdAt": DATE,
        "repo": {"name": repository.name, "type": "model"},
    }


class HuggingFaceHub(Hub):
    token = "hf_test"
    ignores_author = False  # whether it lists the pull requests of all authors
    no_repository = "RepoNotFound"
    no_revision = "RevisionNotFound"

    def is_large(self, path: str, size: int, start: bytes) -> bool:
        return path.endswith(self.large_suffixes) or size > 10_000_000 or b"\0" in start

    def refused(self, refusal: Refusal) -> Answer:
        headers = {"X-Error-Message": refusal.message, **refusal.headers}
        if refusal.code:
            headers["X-Error-Code"] = str(refusal.code)
        return as_json({"error": refusal.message}, refusal.status, headers)

    @route("GET", "/api/whoami-v2", access="write")
    def whoami(self, call: Call) -> Answer:
        return as_json({"type": "user", "name": "tester", "orgs": []})

    @route("POST", "/api/validate-yaml")
    def validate_card(self, call: Call) -> Answer:
        return as_json({"errors": [], "warnings": []})

    @route("POST", "/api/repos/create", access="write")
    def new_repository(self, call: Call) -> Answer:
        name = f"{call.json()['organization']}/{call.json()['name']}"
        url = f"{self.endpoint}/{name}"
        if name in self.repositories:  # the client needs the address here too
            return as_json({"error": "There is such a repository", "url": url}, 409)
        self.create(name)
        return as_json({"url": url})

    @route("GET", "/api/{repository}(?:/revision/{revision})?")
    def describe(self, call: Call, repository: Repository, revision: str | None = None) -> Answer:
        revision = revision or self.resolve(repository, self.branch)
        files, blobs = self.listing(repository.commits[revision].files), "blobs" in call.query
        siblings = [as_sibling(path, blob, blobs) for path, blob in files.items()]
        return as_json({"id": repository.name, "sha": revision, "siblings": siblings})

    @route("GET", "/api/{repository}/commits/{revision}")
    def history(self, call: Call, repository: Repository, revision: str) -> Answer:
        lines, name = [], revision
        while name:  # newest first
            commit = repository.commits[name]
            authors = [{"user": commit.author}] if commit.author else []
            line = {"id": name, "title": commit.title, "message": "", "date": DATE}
            lines.append({**line, "authors": authors})
            name = commit.parent
        return as_json(lines)

    @route("GET", "/api/{repository}/tree/{revision}(?:/{path})?")
    def tree(self, call: Call, repository: Repository, revision: str, path: str = "") -> Answer:
        files = self.listing(repository.commits[revision].files, path)
        return as_json([as_entry(name, blob) for name, blob in files.items()])

    def no_entry(self, path: str, revision: str) -> Refusal:
        return Refusal(404, f"No such file: {path}", "EntryNotFound", {"X-Repo-Commit": revision})

    @route("GET HEAD", "/{repository}/resolve/{revision}/{path}")
    def download(self, call: Call, repository: Repository, revision: str, path: str) -> Answer:
        blob = repository.commits[revision].files.get(path)
        if blob is None:
            raise self.no_entry(path, revision)
        headers = {"X-Repo-Commit": revision}
        if not blob.large:
            return Answer(200, blob.data, {**headers, "ETag": f'"{blob.oid}"'})
        headers |= {"X-Linked-Size": str(len(blob.data)), "X-Linked-ETag": f'"{blob.sha256}"'}
        return Answer(302, b"", {**headers, **self.stored_at(path, blob.sha256)})

    def open_pull(self, repository: Repository, title: str, base: str) -> PullRequest:
        pull = PullRequest(len(repository.pulls) + 1, title, base)
        repository.pulls.append(pull)
        repository.refs[pull.ref] = base
        return pull

    def propose(
        self, name: str, title: str, author: str, files: dict[str, bytes], base: str | None = None
    ) -> str:
        """The ref of a new pull request with these files, on the head or on an earlier commit."""
        repository = self.repositories[name]
        pull = self.open_pull(repository, title, base or self.head(name))
        pull.author = author
        self.commit(name, files, branch=pull.ref)
        repository.commits[repository.refs[pull.ref]].author = author
        return pull.ref

    @route("GET", "/api/{repository}/discussions")
    def list_discussions(self, call: Call, repository: Repository) -> Answer:
        status, rows = call.option("status", "all"), []
        for pull in reversed(repository.pulls):  # the newest first
            state = "open" if pull.status in ("open", "draft") else "closed"
            wanted = call.option("author", pull.author) == pull.author or self.ignores_author
            if status in ("all", state) and call.option("type") != "discussion" and wanted:
                rows.append(as_discussion(repository, pull))
        return as_json({"discussions": rows, "count": len(rows), "start": 0})

    @route("POST", "/api/{repository}/preupload/{revision}", access="write")
    def preupload(self, call: Call, repository: Repository, revision: str) -> Answer:
        answers = []
        for wanted in call.json()["files"]:
            path, sample = wanted["path"], base64.b64decode(wanted["sample"])
            mode = "lfs" if self.is_large(path, wanted["size"], sample) else "regular"
            answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            known = repository.commits[revision].files.get(path)
            if known:  # the client does not send such a file
                answer["oid"] = known.sha256 if known.large else known.oid
            answers.append(answer)
        return as_json({"files": answers})

    @route("POST", "/{repository}[.]git/info/lfs/objects/batch", access="write")
    def negotiate(self, call: Call, repository: Repository) -> Answer:
        answers = []
        for wanted in call.json()["objects"]:
            upload = {"href": f"{self.storage_origin}/storage/{wanted['oid']}"}
            actions = {"upload": upload, "verify": {"href": f"{self.endpoint}/lfs/verify"}}
            known = wanted["oid"] in self.storage
            answers.append(wanted if known else {**wanted, "actions": actions})
        return as_json({"transfer": "basic", "objects": answers})

    @route("POST", "/lfs/verify", access="write")
    def verify(self, call: Call) -> Answer:
        wanted = call.json()
        stored = self.storage.get(wanted["oid"], b"")
        return as_json({}, 200 if len(stored) == wanted["size"] else 404)

    @route("POST", "/api/{repository}/commit/{branch}", access="write")
    def new_commit(self, call: Call, repository: Repository, branch: str) -> Answer:
        ref = branch if branch.startswith("refs/") else f"refs/heads/{branch}"
        parent, files = repository.refs[ref], dict(repository.commits[repository.refs[ref]].files)
        header, *operations = [json.loads(line) for line in call.body.splitlines() if line.strip()]
        summary = header["value"]
        if not parent.startswith(summary.get("parentCommit") or ""):
            raise Refusal(412, f"{branch} has moved on to {parent}")
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "lfsFile":
                files[value["path"]] = self.stored(value["oid"])
            else:  # a push deletes nothing
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
        title, pull = summary["summary"], None
        if "create_pr" in call.query:
            pull = self.open_pull(repository, title, parent)
            ref = pull.ref
        name = repository.add(ref, parent, files, title)
        page = f"{self.endpoint}/{repository.name}"
        answer = {"success": True, "commitOid": name, "commitUrl": f"{page}/commit/{name}"}
        if pull:
            answer["pullRequestUrl"] = f"{page}/discussions/{pull.number}"
        return as_json(answer)


def serve() -> AbstractContextManager[HuggingFaceHub]:
    return running(HuggingFaceHub())
