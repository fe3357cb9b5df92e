"""Models in a zoo, a local Sigstore and keys: what some tests of publishing need."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.zoo_models import model  # noqa: F401


@pytest.fixture
def sigstore(tmp_path):
    """A running Sigstore, whose keys are in the file `sigstore.trust`."""
    pytest.importorskip("model_signing", reason="the extra `sign` is not installed")
    from support import local_sigstore

    with local_sigstore.running(local_sigstore.LocalSigstore()) as running:
        trust = running.write_trust(tmp_path / "trust.json")
        yield SimpleNamespace(server=running, trust=trust, **vars(local_sigstore))


@pytest.fixture
def job(zoo, sigstore, monkeypatch):
    """What `zoo.run` does in a job with `id-token: write`."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "a_token_of_this_job")
    monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"{sigstore.server.endpoint}/token?v=1")

    def run(*words):
        return zoo.run(*words, "--trust-config", sigstore.trust)

    return run


@pytest.fixture
def keys(tmp_path) -> SimpleNamespace:
    """Two private keys, and the public key of each."""
    pytest.importorskip("model_signing", reason="the extra `sign` is not installed")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def write(name: str) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (tmp_path / f"{name}.pem").write_bytes(private)
        (tmp_path / f"{name}.pub.pem").write_bytes(public)
        return tmp_path / f"{name}.pem"

    ours, other = write("ours"), write("other")
    return SimpleNamespace(
        ours=ours,
        other=other,
        public=ours.with_suffix(".pub.pem"),
        other_public=other.with_suffix(".pub.pem"),
    )
