"""The figures of an evaluation, from numbers that can be added up by hand, and those of single KV
heads, beside plain attention computed query by query."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from support import architectures
from support.architectures import WINDOW
from support.models import attention_calls

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.measured import AboutArm
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.evaluation.arms import Arm
from rotationzoo.evaluation.forward import Trial, run_models
from rotationzoo.evaluation.metrics import Buckets, Metrics
from rotationzoo.model.geometry import geometry_of
from rotationzoo.progress import silent
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.simulation.rivals import RivalCodec, store_as_kivi

BUCKETS = Buckets.between(2, 6)


def test_buckets_end_at_powers_of_two():
    assert Buckets.between(320, 2048).ranges == [(320, 512), (512, 1024), (1024, 2048)]
    assert Buckets.between(0, 3).ranges == [(0, 1), (1, 2), (2, 3)]
    assert Buckets.between(4, 6).ranges == [(4, 6)], "the start is in the first bucket itself"


def test_a_position_is_in_one_bucket_and_those_outside_in_none():
    assert BUCKETS.ranges == [(2, 4), (4, 6)]
    member = BUCKETS.one_hot(torch.arange(8))
    assert member.int().tolist() == [[0, 0]] * 2 + [[1, 0]] * 2 + [[0, 1]] * 2 + [[0, 0]] * 2


def measured(losses: list[list[float]], **options) -> Metrics:
    """Of one layer whose block output is 3 where the exact is `exact`."""
    metrics = Metrics(BUCKETS, [0])
    metrics.add_losses(torch.tensor(losses))
    rows = len(losses)
    output = torch.full((rows, 6, 1), 3.0)
    metrics.add_output(0, output, torch.full((rows, 6, 1), options.get("exact", 3.0)))
    return metrics


def test_an_arm_beside_the_exact_model():
    """Four losses a text, from position 2 on: two in each bucket."""
    exact = measured([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    arm = measured([[1.0, 1.2, 1.4, 1.4], [2.0, 2.0, 2.6, 2.6]], exact=2.0)
    arm.add_kl(0, torch.tensor([[[0.1, 0.3]], [[0.1, 0.3]]]), torch.tensor([3, 5]))
    report = arm.measure_arm(exact).model_dump()
    assert exact.tokens == 8
    assert exact.measure_exact().text_losses == [1, 2]
    assert report["perplexity"] == pytest.approx(math.exp(1.775))
    assert report["perplexity_increase"] == pytest.approx(math.expm1(0.275))
    assert report["output_error"] == pytest.approx(0.5), "1 of 2"
    assert report["attention_kl"] == pytest.approx(0.2)
    # Texts lose 0.25 and 0.3: their mean is off by 0.025, and so is its logarithm.
    error = report["standard_error"]["perplexity_increase"]
    assert error == pytest.approx(math.exp(0.275) * 0.025, rel=1e-4)
    first, second = report["by_length"]
    assert (first["from"], first["to"], second["from"], second["to"]) == (2, 4, 4, 6)
    assert first["perplexity_increase"] == pytest.approx(math.expm1(0.05))
    assert second["perplexity_increase"] == pytest.approx(math.expm1(0.5))
    assert (first["attention_kl"], second["attention_kl"]) == pytest.approx((0.1, 0.3))
    [layer] = report["by_layer"]
    heads = layer.pop("heads")
    assert layer == {"layer": 0, "output_error": 0.5, "attention_kl": pytest.approx(0.2)}
    assert heads["attention_kl"] == pytest.approx([0.2])


def test_without_samples_or_a_second_text_there_is_no_figure():
    exact = measured([[1.0, 1.0, 1.0, 1.0]])
    report = measured([[1.0, 1.0, 1.0, 2.0]], exact=2.0).measure_arm(exact)
    assert report.attention_kl is None
    assert set(report.standard_error.values()) == {None}


def test_a_text_that_ends_before_a_bucket_has_no_weight_in_it():
    exact = Metrics(BUCKETS, [0])
    arm = Metrics(BUCKETS, [0])
    for metrics, losses in ((exact, (1.0, 1.0)), (arm, (1.5, 1.1))):
        for loss, length in zip(losses, (2, 4), strict=True):
            metrics.add_losses(torch.full((1, length), loss))
            output = torch.ones(1, 2 + length, 1)
            metrics.add_output(0, output, output)
    first, second = arm.measure_arm(exact).by_length
    assert first.perplexity_increase == pytest.approx(math.expm1(0.3))
    assert second.perplexity_increase == pytest.approx(math.expm1(0.1))
    assert second.standard_error["perplexity_increase"] is None, "a single text is left"


LAYER = 1
CACHE = CacheLayout(sink=2, recent=4)
# Two texts of different lengths, of which the first weighs more.
TEXTS = [
    torch.randint(3, 59, (1, length), generator=torch.Generator().manual_seed(length))
    for length in (24, 17)
]


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Rows as short as these would be compared in one block."""
    monkeypatch.setattr("rotationzoo.evaluation.metrics.COMPARED_TOKENS", 5)


def arms_of(geometry):
    rotations = fit(None, PRESETS["random"], geometry)
    kivi = RivalCodec(partial(store_as_kivi, tokens=4))
    codecs = {"random": RotatedCodec(rotations), "kivi": kivi}
    return [Arm(AboutArm(name=name, kind="baseline"), codec) for name, codec in codecs.items()]


def trial_of(model, **changes) -> Trial:
    """One layer in 2 bits, so that its input is that of the exact model; all queries compared."""
    geometry = geometry_of(model)
    arms = arms_of(geometry)
    start = CACHE.first_quantized
    trial = Trial(geometry, arms, [CACHE], [LAYER], ("key", "value"), queries=100, start=start)
    return replace(trial, **changes)


def measure_layer(model, trial: Trial, texts=TEXTS, arm="random"):
    """What is reported of an arm's layer."""
    sums = run_models(model, texts, trial, silent)
    [layer] = sums.arms[CACHE, arm].measure_arm(sums.exact).by_layer
    return layer.model_dump()


def calls_of(model, texts=TEXTS):
    """Query, key and value `[H, T, D]` of the layer in the exact model, text by text, and what it
    returns, `[H_q, T, D]`."""
    return [[rows[0].double() for rows in call] for call in attention_calls(model, texts)[LAYER]]


def plain_heads(model, arm: Arm, window: int | None):
    """The definition: KL and output error by KV head, over all texts and queries past the start."""
    divergence, error, norm = torch.zeros(3, 2, dtype=torch.float64)
    count, past = 0, slice(CACHE.first_quantized, None)
    for query, key, value, output in calls_of(model):
        stored_key, stored_value = (
            arm.codec.fake_quantize(rows[None].float(), LAYER, side, CACHE.format)[0].double()
            for side, rows in (("key", key), ("value", value))
        )
        group, position = len(query) // len(key), torch.arange(key.shape[1])
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance < (window or len(position)))
        kept = (position < CACHE.sink) | (distance < CACHE.recent)
        for head, rows in enumerate(query):
            kv = head // group
            scores, stored_scores = (
                rows @ keys[kv].mT / rows.shape[-1] ** 0.5 for keys in (key, stored_key)
            )
            p, q = (
                each.masked_fill(~seen, -math.inf).softmax(-1)
                for each in (scores, torch.where(kept, scores, stored_scores))
            )
            divergence[kv] += (p * (p / q).log())[past][seen[past]].sum()
            exact = p @ value[kv]
            torch.testing.assert_close(exact, output[head], rtol=0, atol=1e-5)
            read = (q * kept) @ value[kv] + (q * ~kept) @ stored_value[kv]
            error[kv] += (read - exact)[past].square().sum()
            norm[kv] += exact[past].square().sum()
        count += group * len(position[past])
    return divergence / count, (error / norm).sqrt()


@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", WINDOW)])
def test_every_head_beside_plain_attention(name, window):
    model = architectures.build(name)
    trial = trial_of(model)
    arm = trial.arms[0]
    layer = measure_layer(model, trial)
    kl, error = plain_heads(model, arm, window)
    # Measured: at most 2e-7 apart, because the model computes in float32.
    assert layer["heads"]["attention_kl"] == pytest.approx(kl.tolist(), rel=1e-4)
    assert layer["heads"]["output_error"] == pytest.approx(error.tolist(), rel=1e-4)
    assert layer["attention_kl"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert abs(kl[0] - kl[1]) > 0.01 * kl[0], "heads do differ"


def plain_ranges(rows: list[torch.Tensor], matrix: torch.Tensor) -> list[float]:
    """The mean range of all rows `[H, T, D]` past the sink, by head."""
    ranges = []
    for head in range(len(rows[0])):
        rotated = torch.cat([text[head, CACHE.sink :] for text in rows]) @ matrix[head].double()
        spread = rotated.max(-1).values - rotated.min(-1).values
        ranges.append((spread / rotated.square().mean(-1).sqrt()).mean().item())
    return ranges


def test_ranges_are_those_of_rotated_rows():
    model = architectures.build("qwen3")
    trial = trial_of(model)
    rotations = trial.arms[0].codec.rotations
    matrices = rotations[LAYER].key.matrix, rotations[LAYER].value.matrix
    keys, values = (
        plain_ranges([call[place] for call in calls_of(model)], matrix.expand(2, -1, -1))
        for place, matrix in zip((1, 2), matrices, strict=True)
    )
    measures = measure_layer(model, trial)["heads"]
    assert measures["key_row_range"] == pytest.approx(keys, rel=1e-5)
    assert measures["value_row_range"] == pytest.approx(values, rel=1e-5)
    kivi = measure_layer(model, trial, arm="kivi")["heads"]
    assert kivi["key_row_range"] == [None, None], "rounded channel by channel"
    unrotated = plain_ranges([call[2] for call in calls_of(model)], torch.eye(16).expand(2, -1, -1))
    assert kivi["value_row_range"] == pytest.approx(unrotated, rel=1e-5)


def test_what_is_not_measured_is_null():
    model = architectures.build("llama")
    heads = measure_layer(model, trial_of(model, queries=0, sides=("value",)))["heads"]
    assert heads["attention_kl"] == heads["key_row_range"] == [None, None]
    assert min(heads["output_error"] + heads["value_row_range"]) > 0


def test_a_head_of_zeros_has_no_error():
    sums = Metrics(Buckets((0, 3)), [0])
    output = torch.stack([torch.zeros(1, 3, 4), torch.ones(1, 3, 4)], dim=2)
    sums.add_heads(0, output, output)
    assert sums.measure_heads(0).output_error == [None, 0]
