"""The estimate of an evaluation's memory: linear in the length, and what it refuses."""

import pytest
from support.models import save_tiny
from support.popular import CONFIGS

from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation import job, memory
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.evaluation.memory import EvaluationFootprint
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.recipe import Data


@pytest.fixture(scope="module")
def qwen3_8b():
    """The geometry and config of Qwen3-8B."""
    from transformers import AutoConfig

    options = dict(CONFIGS["Qwen3-8B"])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    return geometry_on_meta(loading.on_meta(config, "Qwen3-8B")), config


def test_memory_grows_with_the_length_and_not_its_square(qwen3_8b):
    short, long = (EvaluationFootprint(*qwen3_8b, length, 2).peak for length in (32768, 131072))
    assert 2 < long / short < 4.1
    # The whole two-copy mask of 131,072 tokens would take 34 GB, their logits 80 GB in float32.
    assert long < 30e9


def test_a_machine_that_cannot_hold_it_is_refused_before_the_weights(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "tiny")
    (model / "model.safetensors").write_text("never read")
    monkeypatch.setattr(memory, "total_memory", lambda *_, **__: 100_000_000)
    with pytest.raises(
        RotationZooError, match=r"texts of 512 tokens need about .* GB, .* for the weights"
    ) as refusal:
        evaluate(Evaluation(str(model), [], Data(tokens=512, length=512)))
    assert "--device-map auto" in refusal.value.hint


def test_only_the_batches_that_there_are_count(tmp_path, monkeypatch):
    def stop(footprint, *_):
        raise RotationZooError(f"{footprint.batch} rows of {footprint.length}")

    monkeypatch.setattr(job, "check_memory", stop)
    model = str(save_tiny(tmp_path / "tiny"))
    with pytest.raises(RotationZooError, match="2 rows of 512"):
        evaluate(Evaluation(model, [], Data(tokens=1024, length=512), batch=64, device="cpu"))
