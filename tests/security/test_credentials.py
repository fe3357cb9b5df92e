"""Credentials in addresses, which no command prints, and words that are no model's name."""

import json

import pytest
from plan_matrix import main
from support.command_line import refused

from rotationzoo.network.tokens import redact


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize("word", [("list",), ("pull", "demo"), ("list", "--json")], ids=" ".join)
def test_an_address_of_an_index_is_refused_and_not_printed(inside, word):
    done = inside(*word, "--index", "https://user:s3cret@127.0.0.1:9/index.json?sig=s3cret")
    assert "--index takes a path, not a URL" in refused(done)
    assert not any(part in done.stdout + done.stderr for part in ("s3cret", "sig=", "user:"))


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
