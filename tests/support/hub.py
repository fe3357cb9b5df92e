"""A read-only Hugging Face hub on the loopback interface, enough for the real clients to download
models and data sets."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" * 6 + "c0ff"


@contextmanager
def serve(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve each folder under its repository id (`datasets/...` for a data set) at one commit.

    Yields the endpoint and the list of requests so far.
    """
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            api = re.match(
                r"/api/(?:models/|(datasets/))([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path
            )
            file = re.match(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            found = api or file
            name = (found[1] or "") + found[2] if found else None
            if name not in repositories:
                return self.reply(
                    404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found"
                )
            if (api[4] if api else file[3]) not in (None, "main", COMMIT):
                return self.reply(
                    404, X_Error_Code="RevisionNotFound", X_Error_Message="Revision not found"
                )
            folder = repositories[name]
            if api:
                files = {
                    str(p.relative_to(folder)): p.stat().st_size
                    for p in sorted(folder.rglob("*"))
                    if p.is_file()
                }
                if api[3] == "tree":
                    listing = [
                        {"type": "file", "path": n, "size": size, "oid": "0" * 40}
                        for n, size in files.items()
                    ]
                    return self.reply(
                        200, json.dumps(listing).encode(), Content_Type="application/json"
                    )
                info = {
                    "id": name,
                    "modelId": name,
                    "sha": COMMIT,
                    "siblings": [{"rfilename": n} for n in files],
                }
                return self.reply(200, json.dumps(info).encode(), Content_Type="application/json")
            wanted = folder / file[4]
            if not wanted.is_file():
                return self.reply(
                    404,
                    X_Error_Code="EntryNotFound",
                    X_Error_Message="Entry not found",
                    X_Repo_Commit=COMMIT,
                )
            body = wanted.read_bytes()
            self.reply(
                200, body, ETag=f'"{hashlib.sha256(body).hexdigest()}"', X_Repo_Commit=COMMIT
            )

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
