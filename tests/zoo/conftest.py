"""A local Sigstore, and a CI job that signs with it."""

from types import SimpleNamespace

import pytest
from support.hubs.server import running
from support.published import model  # noqa: F401


@pytest.fixture
def sigstore(tmp_path):
    """A running Sigstore, with its keys in the file `trust`. `job`: the variables of a job with
    `id-token: write`."""
    pytest.importorskip("model_signing", reason="the extra `sign` is not installed")
    from zoo import local_sigstore

    with running(local_sigstore.LocalSigstore()) as server:
        trust = server.write_trust(tmp_path / "trust.json")
        variables = {
            "GITHUB_ACTIONS": "true",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "a_token_of_this_job",
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{server.endpoint}/token?v=1",
        }
        yield SimpleNamespace(server=server, trust=trust, job=variables, **vars(local_sigstore))


@pytest.fixture
def job(zoo, sigstore, monkeypatch):
    """`zoo.run` in such a job."""
    for name, value in sigstore.job.items():
        monkeypatch.setenv(name, value)

    def run(*words):
        return zoo.run(*words, "--trust-config", sigstore.trust)

    return run
