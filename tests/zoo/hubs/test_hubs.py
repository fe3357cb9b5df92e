"""A file server instead of a hub, and the addresses that get the token."""

import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.command_line import succeeded
from support.published import ZOO, ok, point_clients, refused

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.zoo.hubs.modelscope import may_see_token


class _Noting(SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))


@pytest.fixture
def file_server(tmp_path):
    """The address of a server of the folder `served`, and its requests with their tokens."""
    serve = partial(_Noting, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.asked
        server.shutdown()


def test_a_file_server_stands_in_for_a_hub(zoo, listed, file_server, monkeypatch, tmp_path):
    pulled = Path(succeeded(zoo.run("pull", "demo", "--index", listed, "--quiet")).stdout.strip())
    shutil.copytree(pulled.parents[2], tmp_path / "served" / ZOO / "resolve")
    zoo.forget()
    address, asked = file_server
    point_clients(monkeypatch, address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert ok(zoo.run("list", "--index", listed, "--json"))
    ok(zoo.run("pull", "demo", "--index", listed, "--local-dir", "here", "--json"))
    assert verify(Artifact.open(zoo.folder / "here"), "demo").ok
    folder = f"/{ZOO}/resolve/{'/'.join(pulled.parts[-3:])}"
    assert {(path.rpartition("/")[0], token) for path, token in asked} == {(folder, None)}
    assert "answered 404" in refused(zoo.run("pull", "demo", "--repo", ZOO))


@pytest.mark.parametrize(
    ("endpoint", "url", "trusted"),
    [
        ("https://modelscope.cn", "https://modelscope.cn/api", True),
        ("https://modelscope.cn", "https://lfs.modelscope.cn/x", True),
        ("https://www.modelscope.ai", "https://lfs.modelscope.ai/x", True),
        ("https://modelscope.cn", "http://lfs.modelscope.cn/x", False),
        ("http://modelscope.cn", "https://lfs.modelscope.cn/x", False),
        ("https://modelscope.cn", "https://cdn.modelscope.cn/x", False),
        ("https://modelscope.cn", "https://lfs.modelscope.cn.evil.example/x", False),
        ("https://hub", "https://lfs.hub/x", False),
        ("https://modelscope.cn", "https://evilmodelscope.cn/x", False),
        ("https://modelscope.cn", "https://modelscope.cn@evil.example/x", False),
        ("http://127.0.0.1:80", "http://127.0.0.1:81/x", False),
    ],
)
def test_who_is_told_the_token(endpoint, url, trusted):
    assert may_see_token(endpoint, url) is trusted
