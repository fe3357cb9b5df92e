"""Credentials in addresses, which no command prints, and words that are no model's name."""

import http.server
import json
import threading

import pytest
from plan_matrix import main
from support.command_line import refused

from rotationzoo.network.tokens import redact

SECRETS = ("s3cret", "sig=")
INDEX = {"schema": 1, "entries": []}


@pytest.fixture
def server():
    """`server.address` answers with an empty index, `server.missing` with nothing."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if "index" in self.path else 404)
            self.end_headers()
            self.wfile.write(json.dumps(INDEX).encode())

        def log_message(self, *_) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize("user", ["user:s3cret@", "s3cret@", "user:s3@cret@", "user:s3/cret@"])
@pytest.mark.parametrize("word", [("list",), ("pull", "demo"), ("list", "--json")], ids=" ".join)
def test_a_password_in_an_address_is_neither_printed_nor_sent(inside, server, word, user):
    done = inside(*word, "--index", f"http://{user}{server}/index.json")
    assert "has a user's name or a password in it" in refused(done)
    assert not any(part in done.stdout + done.stderr for part in ("s3cret", "cret@", "user:"))


@pytest.mark.hostile("terminal")
def test_a_signature_in_an_address_is_used_and_not_printed(inside, server):
    done = inside("list", "--index", f"http://{server}/index.json?sig=s3cret", "--html", "x.html")
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr + (inside.folder / "x.html").read_text()
    assert f"Read http://{server}/index.json?..." in done.stderr
    assert not any(secret in shown for secret in SECRETS)
    done = inside("list", "--index", f"http://{server}/nothing?sig=s3cret")
    assert f"{server}/nothing?... cannot be read" in refused(done)
    assert not any(secret in done.stderr for secret in SECRETS)


@pytest.mark.hostile("terminal")
def test_no_message_of_a_library_shows_a_password(monkeypatch, inside):
    """An endpoint with one, which its client quotes in its errors."""
    assert redact("see https://user:s3cret@host/x@y and ftp://a@b") == (
        "see https://host/x@y and ftp://b"
    )
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://user:s3cret@127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    done = inside("list", "--repo", "someone/zoo")
    assert "s3cret" not in done.stdout + refused(done)


@pytest.mark.hostile("path")
@pytest.mark.parametrize("words", [("--", "{}"), ("{}",)], ids=["as the workflow does", "alone"])
@pytest.mark.parametrize(
    "name", ["--configs=/etc", "--version", "--run=gpu=H100", "-x", "../..", "a b/c", "$(id)/x"]
)
def test_a_matrix_is_planned_for_models_alone(tmp_path, monkeypatch, capsys, words, name):
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps({"models": [{"model": "a/b", "revision": "c" * 40, "recipe": "configs/b.yaml"}]})
    )
    words = [word.format(name) for word in words]
    monkeypatch.setattr("sys.argv", ["plan_matrix.py", str(plan), *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert str(stopped.value).startswith("Error: ")
    assert "is no model of the hub" in str(stopped.value)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.argv", ["plan_matrix.py", str(plan), "--", "a/b"])
    main()
    assert capsys.readouterr().out.endswith("any=true\n")
