"""A read-only Hugging Face hub on the loopback interface, enough for the real client to download a model."""

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
    """Serve each folder under its repository id at one commit; yields the endpoint and the list of requests so far."""
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
            api = re.match(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?", self.path)
            file = re.match(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
            name, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else (None, None)
            if name not in repositories:
                return self.reply(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            if revision not in (None, "main", COMMIT):
                return self.reply(404, X_Error_Code="RevisionNotFound", X_Error_Message="Revision not found")
            folder = repositories[name]
            if api:
                files = sorted(p for p in folder.iterdir() if p.is_file())
                if api[2] == "tree":
                    listing = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40} for p in files]
                    return self.reply(200, json.dumps(listing).encode(), Content_Type="application/json")
                info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": [{"rfilename": p.name} for p in files]}
                return self.reply(200, json.dumps(info).encode(), Content_Type="application/json")
            path = folder / file[3]
            if not path.is_file():
                return self.reply(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=COMMIT)
            body = path.read_bytes()
            self.reply(200, body, ETag=f'"{hashlib.sha256(body).hexdigest()}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
