"""Signatures with a key, in push, pull and verify."""

import json
import logging
from pathlib import Path

import pytest
from support.published import ZOO, ok, refused

from rotationzoo import pull
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.writer import add_files, foreign_files
from rotationzoo.zoo import index
from rotationzoo.zoo import signing as signature_check

SIGNATURE = "zoo_index.json.sig"


def test_signed_pulled_and_verified(zoo, made, keys):
    signed = zoo.run("push", made, ZOO, "--to", "both", "--sign", keys.ours, "--json")
    assert "it is signed by the key " in signed.stderr
    ok(signed)
    words = ["--signer", keys.public, "--require-signature", "--json"]
    for hub in ("huggingface", "modelscope"):
        pulled = ok(zoo.run("pull", "demo", "--repo", ZOO, "--from", hub, *words))
        assert pulled["signature"]["signer"] == {"public_key": keys.public.read_text()}
        assert (Path(pulled["path"]) / "model.sig").is_file()
        assert ok(zoo.run("verify", pulled["path"], *words))["signature"]["state"] == "signed"
    place = zoo.folder / "pulled"
    artifact = pull("demo", repo=ZOO, hub="huggingface", signers=[str(keys.public)], folder=place)
    assert artifact.folder == place
    assert artifact.identity == Artifact.open(made).identity
    with pytest.raises(RotationZooError, match="not by the key"):
        pull("demo", repo=ZOO, hub="huggingface", signers=[str(keys.other_public)])


def test_a_key_that_nobody_named_is_said(zoo, signed):
    shown = zoo.run("pull", "demo", "--repo", ZOO, "--json")
    assert "to accept no other, add --signer" in shown.stderr
    path = ok(shown)["path"]
    alone = ok(zoo.run("verify", path, "--json"))["signature"]
    assert alone == {"state": "unchecked", "signer": None}
    assert "which was not checked: add --signer KEY.pem" in zoo.run("verify", path).stdout
    required = refused(zoo.run("verify", path, "--require-signature"))
    assert "it is not known who should have signed" in required
    assert "--signer" in required


@pytest.mark.hostile("hub")
def test_an_index_that_the_user_named_says_who_must_have_signed(zoo, made, keys, tmp_path):
    listed = tmp_path / "zoo_index.json"
    ok(zoo.run("push", made, ZOO, "--sign", keys.ours, "--index", listed, "--json"))
    pulled = ok(zoo.run("pull", "demo", "--index", listed, "--require-signature", "--json"))
    assert pulled["signature"]["state"] == "signed"
    content = json.loads(listed.read_text())
    content["entries"][0]["signer"] = {"public_key": keys.other_public.read_text()}
    listed.write_text(json.dumps(content))
    assert "not by the key" in refused(zoo.run("pull", "demo", "--index", listed))
    content["entries"][0]["signer"]["public_key"] = "-----BEGIN PUBLIC KEY-----\nx\n"
    listed.write_text(json.dumps(content))
    refused(zoo.run("pull", "demo", "--index", listed))
    content["entries"][0]["signer"] = {"identity": "me"}
    listed.write_text(json.dumps(content))
    text = refused(zoo.run("pull", "demo", "--index", listed))
    assert "a signer is an identity and its issuer, or a public key" in text


def test_without_the_extra_a_signature_is_not_checked(zoo, signed, made, keys, monkeypatch):
    monkeypatch.setattr(signature_check, "find_spec", lambda name: None)
    pulled = zoo.run("pull", "demo", "--repo", ZOO, "--json")
    assert "is signed, but the signature was not checked" in pulled.stderr
    assert signature_check.INSTALL in pulled.stderr
    assert ok(pulled)["signature"]["state"] == "unchecked"
    for words in (["--require-signature"], ["--signer", keys.public]):
        text = refused(zoo.run("pull", "demo", "--repo", ZOO, *words))
        assert "checking a signature needs the extra `sign`" in text
        assert signature_check.INSTALL in text
    text = refused(zoo.run("push", made, ZOO, "--sign", keys.ours))
    assert f"{signature_check.INSTALL}; or publish unsigned, with: --sign none" in text
    # A job that signs by default must not silently publish without a signature.
    for name in ("GITHUB_ACTIONS", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"):
        monkeypatch.setenv(name, "true")
    text = refused(zoo.run("push", "no-artifact", ZOO))
    assert "`id-token: write` signs what it publishes unless told otherwise, and that needs" in text
    ok(zoo.run("push", made, f"{ZOO}-2", "--sign", "none", "--json"))


def test_what_is_added_to_an_artifact_ends_its_signature(zoo, signed, caplog, monkeypatch):
    folder = Path(ok(zoo.run("pull", "demo", "--repo", ZOO, "--json"))["path"])
    monkeypatch.setattr(logging.getLogger("rotationzoo"), "propagate", True)
    changed = add_files(Artifact.open(folder), {"answers.png": b"a picture"}, {})
    assert "is no longer signed" in caplog.text
    assert not (folder / "model.sig").exists()
    assert foreign_files(changed.folder) == []
    assert ok(zoo.run("verify", folder, "--json"))["signature"]["state"] == "unsigned"


def test_the_signature_is_of_what_is_published(zoo, made, keys):
    """Even without the statistics, and for an artifact that already has a signature."""
    words = ["--sign", keys.ours, "--json"]
    ok(zoo.run("push", made, ZOO, "--no-statistics", *words))
    asked = ["--repo", ZOO, "--signer", keys.public, "--require-signature", "--json"]
    folder = ok(zoo.run("pull", "demo", *asked))["path"]
    assert not (Path(folder) / "statistics.safetensors").exists()
    kept = zoo.run("push", folder, "someone/copy", "--json")
    assert "it keeps the signature that it came with" in kept.stderr
    ok(kept)
    ok(zoo.run("push", folder, "someone/other", "--sign", keys.other, "--json"))
    asked = ["--repo", "someone/other", "--signer", keys.other_public, "--json"]
    ok(zoo.run("pull", "demo", *asked))


def test_an_unsigned_push_does_not_break_a_signed_index(zoo, signed, made):
    commits = zoo.hf.commits(ZOO)
    text = refused(zoo.run("push", made, ZOO))
    assert f"the index of {ZOO} is signed" in text
    assert zoo.hf.commits(ZOO) == commits


@pytest.mark.hostile("hub")
def test_a_push_does_not_sign_what_somebody_else_has_listed(zoo, made, keys):
    words = ["push", made, ZOO, "--json", "--sign"]
    ok(zoo.run(*words, keys.ours))
    files = zoo.hf.files(ZOO)
    theirs = files[index.NAME].replace(b'"demo"', b'"other"')
    zoo.hf.commit(ZOO, {index.NAME: theirs})
    text = refused(zoo.run(*words, keys.ours))
    assert "is for other files: zoo_index.json differs" in text
    assert "review its 1 artifact, and to sign the index with all of them, add: --adopt" in text
    zoo.hf.commit(ZOO, {}, delete=[SIGNATURE])
    assert "has no signature" in refused(zoo.run(*words, keys.ours))
    ok(zoo.run(*words, keys.ours, "--adopt-index"))
    assert "not by the key" in refused(zoo.run(*words, keys.other))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.pem", "is not the file of a key"),
        ("words.pem", "contains no private key"),
        ("ours.pub.pem", "contains no private key"),
        ("encrypted.pem", "is encrypted"),
        ("ed25519.pem", "is not a key of P-256"),
    ],
)
def test_a_key_that_cannot_sign_is_refused_before_anything_is_read(zoo, keys, tmp_path, name, said):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    def write(name: str, key, protection) -> None:
        encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        (tmp_path / name).write_bytes(key.private_bytes(encoding, kind, protection))

    (tmp_path / "words.pem").write_text("no key")
    password = serialization.BestAvailableEncryption(b"a password")
    write("encrypted.pem", ec.generate_private_key(ec.SECP256R1()), password)
    write("ed25519.pem", ed25519.Ed25519PrivateKey.generate(), serialization.NoEncryption())
    result = zoo.run("push", "no-artifact", ZOO, "--sign", tmp_path / name)
    text = refused(result, code=2 if name == "none.pem" else 1)
    assert said in text
    assert f"-out {tmp_path / name}" not in text  # it would overwrite the key that is there


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--signer", "somebody@example.org"], "is an identity without an issuer", 2),
        (["--issuer", "https://example.org"], "needs a --signer that it vouches for", 2),
        (["--signer", "missing.pem"], "missing.pem cannot be read", 1),
        (["--signer", "ours.pem"], "contains no public key", 1),
        (["--require-signature"], "it is not known who should have signed", 1),
    ],
)
def test_a_demand_that_cannot_be_met_is_refused_before_a_download(
    zoo, made, keys, monkeypatch, words, said, code
):
    ok(zoo.run("push", made, ZOO, "--json"))
    before = len(zoo.hf.requests)
    monkeypatch.chdir(keys.ours.parent)
    text = refused(zoo.run("pull", "demo", "--repo", ZOO, *words), code=code)
    assert said in text
    assert "-out ours.pem" not in text, "no hint would overwrite a private key"
    assert not [request for request in zoo.hf.requests[before:] if "safetensors" in request]
