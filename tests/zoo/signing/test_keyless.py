"""Keyless signatures of a workflow: published, pulled, verified and refused."""

import datetime
import json
from pathlib import Path

import pytest
from support.published import ZOO, nothing_left, ok, refused

from rotationzoo.storage.files import digest
from rotationzoo.zoo import index

OTHER = "https://github.com/stranger/zoo/.github/workflows/regenerate.yml@refs/heads/main"


@pytest.fixture
def published(job, made, zoo, sigstore):
    """A signed artifact on the hub, and the options that accept only its signer."""
    result = job("push", made, ZOO, "--json")
    assert f"it is signed by {sigstore.WORKFLOW}" in result.stderr
    ok(result)
    return ["--repo", ZOO, "--signer", sigstore.WORKFLOW, "--trust-config", sigstore.trust]


def test_signed_pulled_and_verified(zoo, sigstore, published):
    pulled = ok(zoo.run("pull", "demo", *published, "--require-signature", "--json"))
    signer = {"identity": sigstore.WORKFLOW, "issuer": sigstore.GITHUB}
    assert pulled["signature"] == {"state": "signed", "signer": signer}
    again = ok(zoo.run("pull", "demo", *published, "--require-signature", "--json"))
    assert again["signature"] == pulled["signature"], "also if nothing is downloaded"
    words = ["verify", pulled["path"], *published[2:]]
    assert ok(zoo.run(*words, "--json"))["signature"]["state"] == "signed"
    shown = zoo.run(*words)
    assert f"Signature: {pulled['path']} is signed by {sigstore.WORKFLOW}" in shown.stdout
    (entry,) = ok(zoo.run("list", "--repo", ZOO, "--json"))["entries"]
    assert entry["signer"]["identity"] == sigstore.WORKFLOW


def test_the_library_of_the_format_accepts_it_too(zoo, sigstore, published):
    from model_signing import verifying

    folder = Path(ok(zoo.run("pull", "demo", *published, "--json"))["path"])
    config = verifying.Config().use_sigstore_verifier(
        identity=sigstore.WORKFLOW, oidc_issuer=sigstore.GITHUB, trust_config=sigstore.trust
    )
    config.verify(folder, folder / "model.sig")
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="Hash mismatch"):
        config.verify(folder, folder / "model.sig")


@pytest.mark.hostile("hub")
def test_another_identity_is_refused(zoo, sigstore, published):
    text = refused(zoo.run("pull", "demo", "--repo", ZOO, "--signer", OTHER, *published[-2:]))
    assert f"is signed by {sigstore.WORKFLOW}" in text
    assert f"not by {OTHER}" in text
    assert nothing_left(zoo)
    issuer = ["--issuer", "https://accounts.example"]
    assert "not by" in refused(zoo.run("pull", "demo", *published, *issuer))


@pytest.mark.hostile("hub")
def test_a_push_does_not_extend_the_index_of_another_signer(job, made, published, sigstore):
    sigstore.server.identity = OTHER
    text = refused(job("push", made, ZOO))
    assert f"is signed by {sigstore.WORKFLOW}" in text
    assert f"not by {OTHER}" in text
    ok(job("push", made, ZOO, "--adopt-index", "--json"))


def spoil(zoo, change) -> None:
    """Change the index and any file, as anyone with write access can."""
    files = zoo.hf.files(ZOO)
    content = json.loads(files[index.NAME])
    (entry,) = content["entries"]
    folder = entry["copies"][0]["path"]
    changed = change(entry, {path.removeprefix(f"{folder}/"): files[path] for path in files})
    for name, data in changed.items():
        entry["files"][name] = {"size": len(data), "sha256": digest(data)}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    committed = {f"{folder}/{name}": data for name, data in changed.items()}
    zoo.hf.commit(ZOO, {**committed, index.NAME: text.encode()}, delete=["zoo_index.json.sig"])


@pytest.mark.hostile("hub")
def test_a_changed_byte_is_refused(zoo, published):
    """In the manifest: its hash in the index is also changed."""

    def change(entry, files):
        content = json.loads(files["manifest.json"])
        content["notes"] = ["chosen by an expert"]
        return {"manifest.json": json.dumps(content).encode()}

    spoil(zoo, change)
    text = refused(zoo.run("pull", "demo", *published))
    assert "is for other files: manifest.json differs" in text
    assert nothing_left(zoo)


@pytest.mark.hostile("hub")
def test_a_changed_index_is_refused(zoo, published):
    """Even if no signature is required."""
    text = zoo.hf.files(ZOO)[index.NAME].decode()
    zoo.hf.commit(ZOO, {index.NAME: text.replace('"oscar"', '"better"').encode()})
    for words in (published, [*published[:2], *published[-2:]]):
        text = refused(zoo.run("pull", "demo", *words))
        assert "the signature of the index of someone/zoo is for other files" in text


@pytest.mark.hostile("hub")
def test_a_stripped_signature_is_refused(zoo, published, sigstore):
    def change(entry, files):
        del entry["files"]["model.sig"], entry["signer"]
        return {}

    spoil(zoo, change)
    text = refused(zoo.run("pull", "demo", *published, "--require-signature"))
    assert "the index of someone/zoo has no signature, and should have one" in text
    text = refused(zoo.run("pull", "demo", *published))
    assert f"has no signature, and should have one by {sigstore.WORKFLOW}" in text
    assert nothing_left(zoo)
    unasked = zoo.run("pull", "demo", *published[:2], "--json")
    assert "is not signed: nothing shows who made it" in unasked.stderr
    assert ok(unasked)["signature"] == {"state": "unsigned", "signer": None}


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("late", [datetime.timedelta(minutes=20), -datetime.timedelta(minutes=20)])
def test_an_expired_certificate_is_refused(zoo, job, made, sigstore, late):
    """The log entry is later or earlier than the certificate's ten minutes."""
    sigstore.server.late = late
    ok(job("push", made, ZOO, "--json"))
    text = refused(zoo.run("pull", "demo", "--repo", ZOO, "--trust-config", sigstore.trust))
    assert "was not valid at the time of signing" in text
    assert nothing_left(zoo)


@pytest.mark.hostile("hub")
@pytest.mark.parametrize(
    ("part", "says"),
    [("certificateAuthorities", "no trusted authority issued"), ("tlogs", "is invalid")],
)
def test_another_authority_or_log_than_those_trusted_is_refused(
    zoo, published, sigstore, tmp_path, part, says
):
    foreign = sigstore.LocalSigstore(endpoint=sigstore.server.endpoint)
    trust = foreign.write_trust(tmp_path / "foreign.json")
    content = json.loads(sigstore.trust.read_text())
    content["trustedRoot"][part] = json.loads(trust.read_text())["trustedRoot"][part]
    trust.write_text(json.dumps(content))
    assert says in refused(zoo.run("pull", "demo", *published[:-1], trust))


@pytest.mark.parametrize("trust", ["out of reach", "damaged", "missing"])
def test_without_the_keys_of_sigstore_nothing_is_said_to_be_signed(
    zoo, published, sigstore, monkeypatch, tmp_path, trust
):
    from sigstore.models import ClientTrustConfig

    def fail(offline: bool):
        raise OSError("no route to host")

    monkeypatch.setattr(ClientTrustConfig, "production", fail)
    words = [] if trust == "out of reach" else ["--trust-config", tmp_path / "other.json"]
    if trust == "damaged":
        words[1].write_text("{}")
    shown = zoo.run("pull", "demo", "--repo", ZOO, *words, "--json")
    assert "is signed, but was not checked" in shown.stderr
    assert ok(shown)["signature"]["state"] == "unchecked"
    text = refused(zoo.run("pull", "demo", *published[:-2], *words))
    assert "cannot be fetched" in text or "cannot be read as a trust configuration" in text


def test_nobody_signs_keyless_without_an_identity(zoo, made, sigstore, monkeypatch):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setattr("sigstore.oidc.detect_credential", lambda: None)
    text = refused(zoo.run("push", made, ZOO, "--sign", "keyless"))
    assert "there is no identity to sign with" in text
    assert "id-token: write" in text


def test_a_mirror_keeps_the_signature(zoo, job, made, published, sigstore):
    """The artifact is signed by one workflow, and the index on the other hub by another."""
    folder = ok(zoo.run("pull", "demo", *published, "--json"))["path"]
    before = (Path(folder) / "model.sig").read_bytes()
    mirror = sigstore.WORKFLOW.replace("regenerate", "mirror")
    sigstore.server.identity = mirror
    ok(job("push", folder, ZOO, "--to", "modelscope", "--json"))
    copied = zoo.ms.files(ZOO)
    assert [data for path, data in copied.items() if path.endswith("/model.sig")] == [before]
    both = [*published, "--signer", mirror, "--require-signature", "--from", "modelscope"]
    zoo.forget()
    ok(zoo.run("pull", "demo", *both, "--json"))
    text = refused(zoo.run("pull", "demo", *published, *both[-3:]))
    assert f"the index of {ZOO} is signed by {mirror}" in text
