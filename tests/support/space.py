"""The Space of `scripts/space` in a process of its own, on a loopback hub."""

import base64
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import parse_qs, urlencode

import requests

from support.hubs.hub import Answer, Call, Refusal, as_json, route
from support.hubs.huggingface import HuggingFaceHub
from support.hubs.server import running
from support.places import ROOT

CLIENT, SECRET = "the-space", "its-secret"


class SignInHub(HuggingFaceHub):
    """Every visitor agrees at once, and gets the token of the hub's one user."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: dict[str, str] = {}  # -> the address that it was sent to
        self.asked_scopes: list[str] = []
        self.credentials: set[str | None] = set()

    def credential(self, call: Call) -> str | None:
        credential = super().credential(call)
        self.credentials.add(credential)
        return credential

    @route("GET", "/oauth/authorize", access="open")
    def authorize(self, call: Call) -> Answer:
        if call.option("client_id") != CLIENT or call.option("response_type") != "code":
            raise Refusal(400, "No such application")
        self.asked_scopes.append(call.option("scope"))
        code, address = secrets.token_hex(8), call.option("redirect_uri")
        self.codes[code] = address
        query = urlencode({"code": code, "state": call.option("state")})
        return Answer(302, b"", {"Location": f"{address}?{query}"})

    @route("POST", "/oauth/token", access="open")
    def give_token(self, call: Call) -> Answer:
        form = {name: values[0] for name, values in parse_qs(call.body.decode()).items()}
        expected = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        is_application = call.headers.get("Authorization") == f"Basic {expected}"
        address = self.codes.pop(form.get("code", ""), None)  # a code is good for one token
        if not is_application or address is None or address != form.get("redirect_uri"):
            raise Refusal(401, "No such code")
        return as_json({"access_token": self.token, "token_type": "bearer", "expires_in": 28800})


ZOO = "someone/zoo"
OWNERS_TOKEN = "hf_of_the_owner"
APP = ROOT / "scripts" / "space" / "app.py"
_APP = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
import connections
connections.SECONDS = int(sys.argv[2].replace("None", str(connections.SECONDS)))
runpy.run_path(sys.argv[1], run_name="__main__")
"""
_SECONDS = 90  # until it must answer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_space(log, seconds: int | None = None) -> Iterator[SimpleNamespace]:
    """`hub`, `address`, and `ask(path, form, cookie)`, which returns status, headers and text.

    The Space has a token of its owner, and writes to the file `log`. It waits `seconds` for a
    request, or as long as it does otherwise.
    """
    with running(SignInHub()) as hub:
        port = _free_port()
        environment = {
            **os.environ,
            "PORT": str(port),
            "ZOO_REPO": ZOO,
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": OWNERS_TOKEN,
            "OAUTH_CLIENT_ID": CLIENT,
            "OAUTH_CLIENT_SECRET": SECRET,
            "OAUTH_SCOPES": "openid profile write-discussions",
            "OPENID_PROVIDER_URL": hub.endpoint,
        }
        environment.pop("HF_HUB_OFFLINE", None)
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", _APP, APP, str(seconds)],
                env=environment, stdout=file, stderr=file,
            )  # fmt: skip
        address = f"http://127.0.0.1:{port}"

        def ask(path: str, form: dict | None = None, cookie=""):
            method = "GET" if form is None else "POST"
            headers = {"Cookie": cookie, "Sec-Fetch-Site": "same-origin"}
            options = dict(data=form, headers=headers, allow_redirects=False, timeout=_SECONDS)
            answer = requests.request(method, address + path, **options)
            return answer.status_code, answer.headers, answer.text

        try:
            _wait_for(process, port, log)
            yield SimpleNamespace(hub=hub, address=address, ask=ask)
        finally:
            process.terminate()
            process.wait(10)


def _wait_for(process: subprocess.Popen, port: int, log) -> None:
    ends = time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < ends:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"the Space has not started: {log.read_text()}")


def publish_model(hub: SignInHub, name: str, **changes) -> None:
    """A model of which only the config is on the hub."""
    config = {
        "model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936, "head_dim": 128,
        "intermediate_size": 12288, "max_position_embeddings": 40960,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    hub.create(name)
    hub.commit(name, {"config.json": json.dumps(config | changes).encode()})
