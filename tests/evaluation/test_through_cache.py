"""Tasks read through a real 2-bit cache agree with the simulation of it; and drift: what such a
cache makes of the tokens that the exact model generates."""

import json
from dataclasses import replace

import pytest
import torch
from support import architectures
from support.caches import distance, random_arm, read_whole, simulate
from support.command_line import only_error
from support.float64 import CLOSE, to_float64

from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.arms import build_baselines
from rotationzoo.evaluation.evaluate import evaluate
from rotationzoo.evaluation.forward import Trial
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.real_cache import ThroughCache, measure_drift
from rotationzoo.evaluation.tasks import answering
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.prediction import continue_greedily
from rotationzoo.progress import silent
from rotationzoo.recipe import Data, Recipe
from rotationzoo.report.tables import describe_recall

IDS = torch.randint(5, 60, (2, 29), generator=torch.Generator().manual_seed(0))


WINDOWS = {"sink": 2, "recent": 4}


@pytest.mark.parametrize(
    ("windows", "is_exact"),
    [
        (CacheLayout(**WINDOWS), False),
        (CacheLayout(**WINDOWS, prefill_chunk=7), False),
        (CacheLayout(**WINDOWS, prefill_chunk=40), True),
        (CacheLayout(sink=20, recent=20), True),  # longer than the row
    ],
    ids=["decode", "chunks", "one chunk", "long windows"],
)
@pytest.mark.parametrize("kept", [3, 12, 29])
@torch.no_grad()
def test_it_is_called_like_the_model(windows, is_exact, kept):
    """29 tokens leave a last chunk of one, which is no decoding step."""
    model = architectures.build("llama", torch.float64)
    arm = random_arm(model)
    logits = ThroughCache(model, arm, windows)(input_ids=IDS, logits_to_keep=kept).logits
    expected = simulate(model, arm, windows, IDS)[:, -kept:]
    assert logits.shape == expected.shape
    assert distance(logits, expected) <= CLOSE
    exact = read_whole(model, IDS)[:, -kept:]
    assert (distance(logits, exact) <= CLOSE) == is_exact


@pytest.fixture(scope="module")
def job(induction):
    tasks = TaskSettings(("quote",), questions=2)
    text, windows = Data(tokens=352, length=352), [(16, 64)]
    return Evaluation(str(induction), [], text, tasks, windows, queries=0, device="cpu")


def test_recall_tasks_agree_with_the_simulation(job):
    chunked = replace(job, prefill_chunk=128)
    jobs = [replace(chunked, real_cache=real) for real in (False, True)]
    both = [evaluate(each) for each in jobs]
    for measured, cache in zip(both, ("a simulated 2-bit", "a cache that stores 2"), strict=True):
        (said,) = describe_recall(measured)
        assert f"reads quantized from {cache}" in said
    simulated, real = (measured.report() for measured in both)
    assert (simulated["real_cache"], real["real_cache"]) == (False, True)
    assert list(real["arms"]) == ["identity", "hadamard", "random", "kivi"]
    for name, arm in real["arms"].items():
        score, expected = arm["tasks"]["quote"], simulated["arms"][name]["tasks"]["quote"]
        assert score["correct"] == expected["correct"]
        # Measured: at most 3e-4 apart, of 1 to 60 nats.
        assert score["log_probabilities"] == pytest.approx(expected["log_probabilities"], abs=0.01)
    exact = real["exact"]["tasks"]["quote"]["log_probability"]
    worst = real["arms"]["identity"]["tasks"]["quote"]["log_probability"]
    assert worst < exact - 0.1, "the cache is read"


def test_caches_that_ours_does_not_store_are_simulated_beside_it(job, monkeypatch):
    read = []

    def through(model, codec, layout):
        read.append(codec.rotations[0].key.matrix)
        return ThroughCache(model, codec, layout)

    monkeypatch.setattr(answering, "ThroughCache", through)
    asked = replace(job, prefill_chunk=128, baselines=("identity", "kivi", "mlx-2"))
    simulated = evaluate(asked).report()["arms"]
    real = evaluate(replace(asked, real_cache=True)).report()["arms"]
    assert read
    assert all(torch.equal(matrix[0], torch.eye(len(matrix[0]))) for matrix in read)
    for name in ("kivi", "mlx-2"):
        assert real[name]["tasks"] == simulated[name]["tasks"]


def test_what_a_real_cache_does_not_store_is_refused(job):
    for changes in ({"layers": {0}}, {"sides": ("key",)}):
        with pytest.raises(UsageError, match="stores keys and values of all layers"):
            evaluate(replace(job, real_cache=True, **changes))


# ---- drift


PROMPTS = torch.randint(5, 60, (3, 25), generator=torch.Generator().manual_seed(1))
TEXT = Data(tokens=2048, length=512)


@pytest.fixture(scope="module")
def unrotated():
    """A model in float64, and no rotation of it."""
    model = architectures.build("llama", torch.float64)
    arm = build_baselines(Recipe(), geometry_of(model))[0]
    return model, replace(arm, codec=replace(arm.codec, rotations=to_float64(arm.codec.rotations)))


def drift_of(unrotated, layout, tokens):
    model, arm = unrotated
    trial = Trial(geometry_of(model), [arm], [layout], [0], ("key", "value"), 0, 8)
    batches = [PROMPTS[:2], PROMPTS[2:, :20], PROMPTS[:1, :8]]
    drift = measure_drift(model, batches, trial, tokens, silent)
    assert drift.prompt_tokens == [25, 25, 20], "the last is read exact"
    return drift.arms["identity"]


@pytest.mark.parametrize("tokens", [1, 3, 10])
def test_an_exact_cache_does_not_drift(unrotated, tokens):
    drift = drift_of(unrotated, CacheLayout(sink=40, recent=8), tokens)
    assert drift.same_tokens == [tokens] * 3
    assert drift.by_step[-1].to == tokens
    for part in drift.by_step:
        assert part.agreement == 1
        assert part.standard_error["agreement"] == 0
        # A sum over the vocabulary of differences of log probabilities in float32.
        assert abs(part.kl) < 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("chunk", [None, 8])
@torch.no_grad()
def test_the_greedy_text_of_the_cache_is_another_after_as_many_tokens(unrotated, chunk):
    model, arm = unrotated
    layout = CacheLayout(sink=2, recent=4, prefill_chunk=chunk)
    drift = drift_of(unrotated, layout, 12)
    assert [(part.from_, part.to) for part in drift.by_step] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert drift.by_step[-1].kl > 1e-3
    prompt = PROMPTS[2:, :20]
    exact, _ = continue_greedily(model, prompt, None, 12)
    cache = RotatedCache(CacheSettings(arm.codec, layout), model)
    for start in range(0, 20 - (chunk or 20), chunk or 20):
        model(input_ids=prompt[:, start : start + chunk], past_key_values=cache)
    rest = prompt[:, cache.get_seq_length() :]
    written, _ = continue_greedily(model, rest, cache, 12)
    same = (written == exact).int().cumprod(1).sum().item()
    assert same == drift.same_tokens[2] < 12


@pytest.mark.thorough
def test_no_rotation_drifts_more_than_a_calibrated_one(artifacts, inside):
    settings = "--tokens 1536 --length 512 --batch 3 --windows 16/64 --queries 0"
    tasks = "--tasks needles --questions 8 --lengths 1024"
    words = ["evaluate", "demo", artifacts[0], "--drift", 32, *settings.split(), *tasks.split()]
    shown = inside(*words, "--save", "--details")
    assert shown.returncode == 0, shown.stderr
    saved = Artifact.open(artifacts[0])
    drift = saved.measured.drift
    assert json.loads((saved.folder / "evaluation.json").read_text())["drift"]["tokens"] == 32
    assert list(drift.arms) == ["oscar", "oscar+feedback", "oscar+pooled", "identity"]
    assert drift.prompt_tokens == [512] * 3
    divergence = {}
    for name, arm in drift.arms.items():
        assert [part.to for part in arm.by_step] == [8, 16, 24, 32]
        assert all(part.standard_error["kl"] > 0 for part in arm.by_step)
        divergence[name] = sum(part.kl for part in arm.by_step) / 4
    # Measured: .050 with error feedback, .073 with the nearest codes and .173 without rotation.
    assert 2 * divergence["oscar+feedback"] < divergence["identity"]
    assert divergence["oscar"] < divergence["identity"]
    first, last = drift.arms["oscar+feedback"].by_step[0], drift.arms["oscar+feedback"].by_step[-1]
    (line,) = (line for line in shown.stdout.splitlines() if "generates the exact" in line)
    assert line.startswith(
        f"oscar+feedback generates the exact model's token at {first.agreement:.1%}"
    )
    assert f"tokens 25 to 32 (KL {last.kl:.4f} ±{last.standard_error['kl']:.4f})." in line
    assert "drift: same next token" in shown.stdout
    assert "drift: KL" in shown.stdout
    said = inside("export", artifacts[0], "--for", "sglang", "--pooled", "-o", "pooled").stderr
    shares = [drift.arms[name].by_step[-1].agreement for name in ("oscar+pooled", "oscar")]
    assert f", {shares[0]:.1%} of late tokens the exact model's instead of {shares[1]:.1%}" in said


@pytest.mark.thorough
def test_an_evaluation_that_is_saved_keeps_the_drift_of_its_own_arms(artifacts):
    job = Evaluation("demo", artifacts, TEXT, TaskSettings(()), queries=0, drift=4)
    job = replace(job, save_to=artifacts, baselines=("identity",))
    report = evaluate(job)
    own = ["oscar", "oscar-v1", "oscar+feedback", "oscar+pooled"]
    assert list(report.drift.arms) == [*own, "identity"], "the other is pooled already"
    kept = Artifact.open(artifacts[1]).measured.drift.arms
    assert list(kept) == ["oscar-v1", "identity"]
    (decision,) = report.window.verdict.decisions[:1]
    assert decision.arm == "oscar+feedback", "what is pooled is measured, and not judged"


def test_what_cannot_be_measured_is_refused_before_the_weights_are_read(inside, artifacts):
    job = Evaluation("demo", [], TEXT, TaskSettings(()), drift=4, layers={0})
    with pytest.raises(UsageError, match="stores keys and values of all layers"):
        evaluate(job)
    with pytest.raises(RotationZooError, match="longer than the 8192 positions") as refused:
        evaluate(replace(job, layers=None, drift=8000))
    assert "give a smaller --drift" in refused.value.hint
    assert "--drift" in only_error(inside("evaluate", "demo", "--drift", 0), 2)
