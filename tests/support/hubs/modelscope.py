"""A ModelScope hub in memory, for models. It has the fields that `modelscope_hub` reads."""

import base64
from contextlib import AbstractContextManager
from http.cookies import SimpleCookie
from typing import Any, ClassVar

from support.hubs.hub import Answer, Blob, Call, Hub, Refusal, Repository, as_json, route
from support.hubs.server import running

LARGE = 64 * 1024  # bytes; the client sends larger files to the storage
ALWAYS_SMALL = ("README.md", "config.json", "configuration.json", ".gitattributes")


def wrapped(data: Any = None, headers: dict[str, str] | None = None) -> Answer:
    return as_json(
        {"Code": 200, "Success": True, "Message": "success", "RequestId": "test", "Data": data},
        headers=headers,
    )


class ModelScopeHub(Hub):
    token = "ms_test"
    branch = "master"
    no_repository = 10010205001
    first_files: ClassVar = {
        **Hub.first_files,
        "README.md": b"---\nlicense: Apache License 2.0\n---\n",
    }

    def is_large(self, path: str, size: int, start: bytes) -> bool:
        if path.rpartition("/")[2] in ALWAYS_SMALL:
            return False
        return path.endswith(self.large_suffixes) or size > LARGE

    def credential(self, call: Call) -> str | None:
        """The client sends its token as a header, as a cookie, or both."""
        cookie = SimpleCookie(call.headers.get("Cookie", "")).get("m_session_id")
        return super().credential(call) or (cookie.value if cookie else None)

    def refused(self, refusal: Refusal) -> Answer:
        body = {
            "Code": refusal.code or refusal.status,
            "Success": False,
            "Message": refusal.message,
            "RequestId": "test",
        }
        return as_json(body, refusal.status, refusal.headers)

    @route("POST", "/api/v1/models", access="write")
    def new_repository(self, call: Call) -> Answer:
        wanted = call.json()
        name = f"{wanted['Path']}/{wanted['Name']}"
        if name in self.repositories:
            raise Refusal(400, "A model of this name exists", 10010101001)
        self.create(name)
        return wrapped({"Id": 1, **{key: wanted[key] for key in ("Path", "Name", "Visibility")}})

    @route("GET", "/(?:openapi|api)/v1/models/{repository}")
    def describe(self, call: Call, repository: Repository) -> Answer:
        owner, name = repository.name.split("/")
        data = {"id": repository.name, "owner": owner, "name": name}
        # The two addresses have different keys.
        return as_json({"success": True, "data": data, "Code": 200, "Data": data})

    @route("GET", "/api/v1/models/{repository}/revisions")
    def revisions(self, call: Call, repository: Repository) -> Answer:
        found: dict[str, list] = {"Branches": [], "Tags": []}
        for ref, commit in repository.refs.items():
            _, kind, name = ref.split("/", 2)
            row = {"Revision": name, "CommitId": commit, "CreatedAt": 0}
            found["Tags" if kind == "tags" else "Branches"].append(row)
        return wrapped({"RevisionMap": found})

    @route("POST", "/api/v1/models/{repository}/repo/tag", access="write")
    def new_tag(self, call: Call, repository: Repository) -> Answer:
        ref = f"refs/tags/{call.json()['TagName']}"
        assert ref not in repository.refs
        repository.refs[ref] = self.resolve(repository, call.json()["Ref"])
        return wrapped({})

    @route("POST", "/api/v1/repos/models/{repository}/info/lfs/objects/batch", access="write")
    def negotiate(self, call: Call, repository: Repository) -> Answer:
        answers = []
        for wanted in call.json()["objects"]:
            # At the endpoint: the client sends its token to any address, even to another host.
            actions = {"upload": {"href": f"{self.endpoint}/storage/{wanted['oid']}"}}
            known = wanted["oid"] in self.storage
            answers.append(wanted if known else {**wanted, "actions": actions})
        return wrapped({"objects": answers})

    @route("POST", "/api/v1/repos/models/{repository}/commit/{branch}", access="write")
    def new_commit(self, call: Call, repository: Repository, branch: str) -> Answer:
        ref = f"refs/heads/{branch}"
        parent, wanted = repository.refs[ref], call.json()
        files = dict(repository.commits[parent].files)
        for action in wanted["actions"]:
            if action["type"] == "lfs":
                files[action["path"]] = self.stored(action["sha256"])
            else:
                files[action["path"]] = Blob(base64.b64decode(action["content"]), False)
        return wrapped({"CommitId": repository.add(ref, parent, files, wanted["commit_message"])})

    def revision(self, call: Call, repository: Repository) -> str:
        return self.resolve(repository, call.option("Revision", self.branch))

    @route("GET", "/api/v1/models/{repository}/repo/files")
    def list_files(self, call: Call, repository: Repository) -> Answer:
        revision = self.revision(call, repository)
        files = self.listing(repository.commits[revision].files, call.option("Root"))
        rows: list[dict] = []
        for path, blob in files.items():
            row = {"Path": path, "Name": path.rpartition("/")[2], "Size": len(blob.data)}
            row |= {"Type": "blob", "Sha256": blob.sha256, "IsLFS": blob.large}
            rows.append({**row, "Revision": revision})
        return wrapped({"Files": rows})

    @route("GET HEAD", "/api/v1/models/{repository}/repo")
    def download(self, call: Call, repository: Repository) -> Answer:
        path = call.option("FilePath")
        blob = repository.commits[self.revision(call, repository)].files.get(path)
        if blob is None:
            raise Refusal(404, f"No such file: {path}")
        if blob.large:
            return Answer(302, b"", self.stored_at(path, blob.sha256))
        return Answer(200, blob.data)


def serve() -> AbstractContextManager[ModelScopeHub]:
    return running(ModelScopeHub())
