"""Which rotations a running server reads, by its answers and the record."""

import json
import shutil

import pytest
import torch
from support.hubs.hub import Answer, Hub, as_json, route
from support.hubs.server import running
from transformers import AutoModelForCausalLM

from rotationzoo import api
from rotationzoo.artifact.measured import Probe
from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.server import KEY, LogProbabilities, compare

MODELS = {"data": [{"id": "served", "owned_by": "vllm", "max_model_len": 2048}]}


@pytest.fixture(scope="module")
def recorded(calibrated, tiny, tmp_path_factory) -> Artifact:
    """The artifact of the tiny model after `evaluate --save`."""
    folder = shutil.copytree(calibrated.folder, tmp_path_factory.mktemp("recorded") / "saved")
    api.evaluate(str(tiny), folder, save=True, tasks=[], tokens=512, device="cpu", baselines=())
    return Artifact.open(folder)


def answers(probe: Probe, column: list[list[float]], noise=0.0) -> dict:
    """The answer of a server with the log probabilities of a column and normal noise, in nats."""
    noisy = torch.tensor(column) + noise * torch.randn(len(column), len(column[0]))
    tops = [
        {f"token_id:{token}": number for token, number in zip(*row, strict=True)}
        for row in zip(probe.candidates, noisy.tolist(), strict=True)
    ]
    return {"tokens": [f"token_id:{token}" for token in probe.tokens], "top_logprobs": tops}


def made_up(change: float) -> Probe:
    """A record of 16 tokens that rounding moves by normal `change` nats."""
    torch.manual_seed(0)
    exact = torch.randn(16, 5)
    ids = torch.arange(80).view(16, 5)
    return Probe(
        prompt=[1],
        tokens=ids[:, 0].tolist(),
        candidates=ids.tolist(),
        exact=exact.tolist(),
        log_probabilities=(exact + change * torch.randn(16, 5)).tolist(),
    )


@pytest.mark.parametrize(
    ("change", "column", "noise", "tokens", "verdict"),
    [
        (0.2, "log_probabilities", 0.05, 16, "in use"),
        (0.2, "exact", 0.05, 16, "exact"),
        (0.2, "exact", 0.2, 16, "other"),
        (0.2, "log_probabilities", 0.0, 8, "unclear"),
        (0.03, "log_probabilities", 0.0, 16, "unclear"),
    ],
)
def test_the_verdict_is_the_nearer_reading(change, column, noise, tokens, verdict):
    probe = made_up(change)
    said = answers(probe, getattr(probe, column), noise)
    # Another token: what comes after it has another context.
    said["tokens"][tokens - 1 :] = ["token_id:99"] * (17 - tokens)
    reading = compare([probe], [LogProbabilities(**said)])
    assert reading.compared == 5 * (tokens - 1), "all but those of the first token"
    assert reading.verdict == verdict


def test_the_record_has_what_the_exact_model_says_and_what_codes_change(recorded, tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    probes = recorded.measured.probes
    assert len(probes) == 4
    for probe in probes:
        ids = torch.tensor([*probe.prompt, *probe.tokens])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(probe.prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(probe.candidates))
        torch.testing.assert_close(torch.tensor(probe.exact), exact, rtol=0, atol=1e-3)
        change = (torch.tensor(probe.log_probabilities) - exact).abs().mean(1)
        assert change[0] < 1e-3, "a prompt reads itself exact"
        assert change[1:].mean() > 0.02
        assert [row[0] for row in probe.candidates] == probe.tokens


class ModelServer(Hub):
    """Answers as a server of a model does, and remembers what it was asked, with the keys."""

    def __init__(self, models=MODELS, complete=None, status=200, metrics=None):
        super().__init__()
        self.models, self.complete, self.status, self.asked = models, complete, status, []
        self.metrics = metrics

    @route("GET", "/metrics", access="open")
    def show_metrics(self, call):
        return Answer(404 if self.metrics is None else 200, (self.metrics or "").encode())

    @route("GET", "/v1/models", access="open")
    def list_models(self, call):
        data = self.models
        return Answer(self.status, data if isinstance(data, bytes) else json.dumps(data).encode())

    @route("POST", "/v1/completions", access="open")
    def answer_prompt(self, call):
        self.asked.append((call.json(), call.headers["authorization"]))
        return as_json({"choices": [{"logprobs": self.complete and self.complete(call.json())}]})


def recorded_server(artifact, metrics=None) -> ModelServer:
    """Answers what is recorded, or with its `column` what the exact model answers."""
    probes = {tuple(probe.prompt): probe for probe in artifact.measured.probes}

    def complete(body):
        probe = probes[tuple(body["prompt"])]
        return answers(probe, getattr(probe, hub.column))

    hub = ModelServer(complete=complete, metrics=metrics)
    hub.column = "log_probabilities"
    return hub


@pytest.mark.parametrize("column", ["log_probabilities", "exact"])
def test_a_server_is_asked_and_judged(inside, recorded, monkeypatch, column):
    hub = recorded_server(recorded)
    hub.column = column
    monkeypatch.setenv(KEY, "secret-key")
    with running(hub) as server:
        words = ["verify", recorded.folder, "--server"]
        shown = inside(*words, f"{server.endpoint}/v1/", "--json")
        said = inside(*words, server.endpoint)
    result = json.loads(shown.stdout)
    salts = {body["cache_salt"] for body, _ in server.asked}
    assert len(salts) == len(server.asked) == 8, "no cached prefix is read"
    assert {key for _, key in server.asked} == {"Bearer secret-key"}
    if column == "exact":
        assert shown.returncode == said.returncode == 1
        assert result["server"]["verdict"] == "exact"
        assert "reads an exact cache: the artifact is not in use" in said.stderr
        assert f"--rotations {recorded.folder}" in said.stderr
        assert not result["ok"]
    else:
        assert shown.returncode == said.returncode == 0, said.stderr
        assert result["ok"]
        assert result["server"]["to_record"] == 0
        assert "The server reads these rotations" in said.stdout


def test_too_little_to_tell_is_an_outcome_of_its_own(inside, recorded):
    """Not a refusal, whose hint is to start another server."""
    hub = recorded_server(recorded)
    complete = hub.complete

    def answer_with_other_tokens(body):
        said = complete(body)
        return {**said, "tokens": ["token_id:99"] * len(said["tokens"])}

    hub.complete = answer_with_other_tokens
    with running(hub) as server:
        words = ["verify", recorded.folder, "--server", server.endpoint]
        shown, said = inside(*words, "--json"), inside(*words)
        named = inside(*words, "--quiet")
    assert shown.returncode == said.returncode == named.returncode == 4
    result = json.loads(shown.stdout)
    assert (result["ok"], result["problems"]) == (False, [])
    assert result["server"]["verdict"] == "unclear"
    assert "is sound" in said.stdout
    error, hint = said.stderr.splitlines()
    assert error.startswith("Error: the check cannot tell which rotations the server at ")
    assert hint == "Hint: see in the server's log how many layers are stored in 2 bits"
    assert named.stdout.strip() == ""
    assert "exit 4" in inside("verify", "--help").stdout


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"models": {"data": [{"id": "a", "owned_by": "llamacpp"}]}}, "is not vLLM"),
        ({"models": {"data": []}}, "is damaged: data: "),
        ({"models": b"<html>"}, "not valid JSON"),
        ({"status": 401}, f"does not accept the key in {KEY}"),
        ({"status": 307, "models": b"elsewhere"}, "answers with status 307: elsewhere"),
        ({}, "gives no log probabilities"),
        (
            {"models": {"data": [{**MODELS["data"][0], "max_model_len": 100}]}},
            "takes 100 tokens, and the record has 512",
        ),
    ],
)
def test_a_server_that_cannot_be_compared_is_an_error_of_one_sentence(
    inside, recorded, answer, said
):
    with running(ModelServer(**answer)) as server:
        done = inside("verify", recorded.folder, "--server", server.endpoint)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert said in error
    assert hint.startswith("Hint: ")


def test_no_server_no_record_and_no_address(inside, recorded, calibrated):
    for artifact, address, said, next_command in (
        (recorded, "http://127.0.0.1:9", "does not answer", f"tiny --rotations {recorded.folder}"),
        (calibrated, "http://127.0.0.1:9", "has no record", "rotationzoo evaluate "),
        (recorded, "ftp://127.0.0.1", "is not the address of a server", "--server http://"),
        (recorded, "http://[", "does not answer", "rotationzoo serve"),
    ):
        done = inside("verify", artifact.folder, "--server", address)
        assert done.returncode == (2 if address.startswith("ftp") else 1)
        assert said in done.stderr
        assert next_command in done.stderr


METRICS = """# TYPE rotationzoo_layers gauge
rotationzoo_artifact_info{artifact="%s",engine="0",format="vllm",rank="0"} 1.0
rotationzoo_layers{engine="0",rank="0"} 4.0
vllm:num_requests_running{engine="0"} 2.0
"""


def test_the_metrics_of_a_server_are_read(inside, recorded):
    hub = recorded_server(recorded, METRICS % recorded.identity)
    with running(hub) as server:
        words = ["verify", recorded.folder, "--server", server.endpoint]
        shown = inside(*words, "--json")
        hub.metrics = METRICS % ("0" * 64)
        other = inside(*words)
    assert json.loads(shown.stdout)["server"]["artifact"] == recorded.identity
    assert (shown.returncode, other.returncode) == (0, 1)
    assert f"serves another artifact, by its metrics: {'0' * 64}" in other.stderr


@pytest.mark.hostile("hub")
@pytest.mark.parametrize(
    "text",
    [
        "rotationzoo_" + "a" * 1_000_000 + "\n" + "rotationzoo_a{" + "} " * 1_000_000,
        'rotationzoo_artifact_info{artifact="\x1b]0;a\x07"} x\n' * 1000,
        "rotationzoo_artifact_info{} 1\n" * 1_000_000,
    ],
)
def test_metrics_that_are_none_change_nothing(inside, recorded, text):
    with running(recorded_server(recorded, text)) as server:
        done = inside("verify", recorded.folder, "--server", server.endpoint)
    assert done.returncode == 0
