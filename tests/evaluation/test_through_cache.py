"""Tasks read through a real 2-bit cache agree with the simulation of it."""

from dataclasses import replace

import pytest
import torch
from support import architectures
from support.caches import distance, random_arm, read_whole, simulate
from support.float64 import CLOSE

from rotationzoo.codec.layout import CacheLayout
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.evaluate import evaluate
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.real_cache import ThroughCache
from rotationzoo.evaluation.tasks import answering
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.recipe import Data
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
