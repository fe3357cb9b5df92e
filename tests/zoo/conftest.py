"""Models in a zoo and a local Sigstore: what some tests of publishing need."""

from types import SimpleNamespace

import pytest
from support.hubs.server import running
from support.published import model  # noqa: F401


@pytest.fixture
def sigstore(tmp_path):
    """A running Sigstore, whose keys are in the file `sigstore.trust`. `sigstore.job` are the
    variables of a job with `id-token: write`."""
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
    """What `zoo.run` does in such a job."""
    for name, value in sigstore.job.items():
        monkeypatch.setenv(name, value)

    def run(*words):
        return zoo.run(*words, "--trust-config", sigstore.trust)

    return run
