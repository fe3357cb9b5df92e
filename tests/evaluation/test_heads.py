"""The figures of single KV heads, beside plain attention computed query by query."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from support import architectures
from support.architectures import WINDOW

from rotationzoo.calibration.fit import fit
from rotationzoo.evaluation import metrics
from rotationzoo.evaluation.forward import Trial, run_models
from rotationzoo.evaluation.metrics import HeadSums
from rotationzoo.model.capture import capture
from rotationzoo.model.geometry import geometry_of
from rotationzoo.progress import silent
from rotationzoo.recipe import PRESETS
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.kivi import KiviArm
from rotationzoo.simulation.layout import CacheLayout

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
    monkeypatch.setattr(metrics, "COMPARED_TOKENS", 5)


def arms_of(geometry):
    rotations = fit(None, PRESETS["random"], geometry)
    return [Arm("random", rotations), KiviArm("kivi", rotations, tokens=4)]


def trial_of(model, **changes) -> Trial:
    """One layer in 2 bits, so that its input is that of the exact model; all queries compared."""
    geometry = geometry_of(model)
    arms = arms_of(geometry)
    start = CACHE.first_quantized
    trial = Trial(geometry, arms, [CACHE], [LAYER], ("key", "value"), queries=100, start=start)
    return replace(trial, **changes)


def measured(model, trial: Trial, texts=TEXTS, arm="random"):
    """What is reported of an arm's layer."""
    sums = run_models(model, texts, trial, silent)
    [layer] = sums.arms[CACHE, arm].measure_arm(sums.exact).by_layer
    return layer.model_dump()


def calls_of(model, texts=TEXTS):
    """Query, key and value `[H, T, D]` of the layer in the exact model, text by text, and what it
    returns, `[H_q, T, D]`."""
    calls = []

    def keep(layer, *tensors):
        if layer == LAYER:
            calls.append([tensor[0].double() for tensor in tensors])

    with torch.no_grad(), capture(model, keep):
        for ids in texts:
            model(input_ids=ids, use_cache=False)
    return calls


def plain_heads(model, arm: Arm, window: int | None):
    """The definition: KL and output error by KV head, over all texts and queries past the start."""
    divergence = torch.zeros(2, dtype=torch.float64)
    count, error, norm = 0, torch.zeros_like(divergence), torch.zeros_like(divergence)
    for query, key, value, output in calls_of(model):
        stored = [
            arm.fake_quantize(rows[None].float(), LAYER, side, CACHE.format)[0].double()
            for side, rows in (("key", key), ("value", value))
        ]
        group, length = len(query) // len(key), key.shape[1]
        for head in range(len(query)):
            kv = head // group
            for t in range(CACHE.first_quantized, length):
                position = torch.arange(length)
                kept = (position < CACHE.sink) | (position > t - CACHE.recent)
                seen = position <= t
                if window is not None:
                    seen &= position > t - window
                read = [
                    torch.where(kept[:, None], rows[kv], other[kv])
                    for rows, other in zip((key, value), stored, strict=True)
                ]
                p, q = (
                    (query[head, t] @ keys.T / query.shape[-1] ** 0.5)
                    .masked_fill(~seen, -math.inf)
                    .softmax(-1)
                    for keys in (key[kv], read[0])
                )
                divergence[kv] += (p * (p / q).log())[seen].sum()
                exact = p @ value[kv]
                torch.testing.assert_close(exact, output[head, t], rtol=0, atol=1e-5)
                error[kv] += (q @ read[1] - exact).square().sum()
                norm[kv] += exact.square().sum()
        count += group * (length - CACHE.first_quantized)
    return divergence / count, (error / norm).sqrt()


@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", WINDOW)])
def test_every_head_beside_plain_attention(name, window):
    model = architectures.build(name)
    trial = trial_of(model)
    arm = trial.arms[0]
    layer = measured(model, trial)
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
    rotations = trial.arms[0].rotations
    matrices = rotations[LAYER].key.matrix, rotations[LAYER].value.matrix
    keys, values = (
        plain_ranges([call[place] for call in calls_of(model)], matrix.expand(2, -1, -1))
        for place, matrix in zip((1, 2), matrices, strict=True)
    )
    measures = measured(model, trial)["heads"]
    assert measures["key_row_range"] == pytest.approx(keys, rel=1e-5)
    assert measures["value_row_range"] == pytest.approx(values, rel=1e-5)
    kivi = measured(model, trial, arm="kivi")["heads"]
    assert kivi["key_row_range"] == [None, None], "rounded channel by channel"
    assert kivi["value_row_range"] == pytest.approx(values, rel=1e-5)


def test_what_is_not_measured_is_null():
    model = architectures.build("llama")
    heads = measured(model, trial_of(model, queries=0, sides=("value",)))["heads"]
    assert heads["attention_kl"] == heads["key_row_range"] == [None, None]
    assert min(heads["output_error"] + heads["value_row_range"]) > 0


def test_a_head_of_zeros_has_no_error():
    sums = HeadSums(defaultdict(list))
    output = torch.stack([torch.zeros(1, 3, 4), torch.ones(1, 3, 4)], dim=2)
    sums.add_output(0, output, output)
    assert sums.measure(0).output_error == [None, 0]
