"""The metric of errors without gradients: errors of attention, scaled to measured losses."""

import itertools
import re
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from support.architectures import CALIBRATED, SPARSE, build, families
from support.caches import with_transforms
from support.jobs import SMALL, job
from support.models import demo_tokenizer, edited_weights, load_saved, load_tokenizer, save_tiny

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import EvenBudget
from rotationzoo.calibration import sensitivity
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.collect import collect
from rotationzoo.checks.verify import verify
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.codec.formats import SEGMENTS
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.linalg.transform_coding import REMAINING, SEGMENT
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.prediction import divergence_of
from rotationzoo.progress import silent
from rotationzoo.recall.questions import POOLS
from rotationzoo.recipe import Data, Recipe
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.sides import cost_kinds, metric_kind
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.text.rows import read_corpus

RECIPE = PRESETS["attention"].model_copy(update={"data": SMALL})
FEW_TOKENS = Recipe(sink=4, recent=4)
ROWS = [torch.arange(48) % 59, torch.arange(40) % 7]
FEW_TEXTS = sensitivity.write_texts(ROWS, FEW_TOKENS, demo_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model whose second layer's attention changes little."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    with edited_weights(folder) as weights:
        weights["model.layers.1.self_attn.o_proj.weight"] *= 0.01
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_saved(folder)


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory) -> Artifact:
    """An artifact of the recipe `attention`, which no test may change."""
    return calibrate(job(folder, tmp_path_factory.mktemp("attention"), RECIPE))


def test_layers_with_larger_losses_get_more_bits(made):
    assert verify(made).problems == []
    for side in ("key", "value"):
        first, second = (made.rotations[layer][side] for layer in (0, 1))
        assert first.costs.sum() > 10 * second.costs.sum() > 0
        assert first.widths.sum() > second.widths.sum()


def test_errors_cost_what_they_change_of_attention(made):
    for layer, side, _ in made.rotations.each():
        moments = made.statistics[layer]
        metric = moments[metric_kind(side)].second_moment
        (kind,) = cost_kinds(side)
        attention = moments[kind].second_moment
        share = metric.norm() / attention.norm()
        assert torch.allclose(metric, share * attention, rtol=1e-9)


def test_costs_predict_the_losses_that_were_measured(model, made, monkeypatch):
    losses = {}
    measure = sensitivity.measure_losses
    note = lambda *given: losses.update(measure(*given)) or losses  # noqa: E731
    monkeypatch.setattr(sensitivity, "measure_losses", note)
    recipe = RECIPE.model_copy(update={"sink": 4, "recent": 4})
    statistics = collect(model, made.geometry, [row[None] for row in ROWS], recipe)
    sensitivity.add_attention_metric(statistics, model, made.geometry, FEW_TEXTS, recipe, silent)
    rotations = spend_bits(fit(statistics, recipe, made.geometry), EvenBudget(sensitivity.BITS))
    least = sensitivity.SMALLEST * sum(losses.values()) / len(losses)
    for layer, side, rotation in rotations.each():
        left = torch.tensor(REMAINING)[rotation.widths].repeat_interleave(SEGMENT, dim=-1)
        predicted = (rotation.costs * left).sum().item()
        assert predicted == pytest.approx(max(least, losses[layer, side]), rel=1e-6)


def measured(model, made, texts):
    given = model, made.geometry, made.rotations, texts, silent
    return [*sensitivity.measure_losses(*given).values()]


def test_noise_is_subtracted_and_texts_are_clamped_before_their_mean(model, made, monkeypatch):
    """Losses of two texts at each place, minus a noise of 5: 1, 3; -3, 1; 4, -2; 0, 0."""
    losses = map(torch.tensor, [5, 6, 2, 9, 5, 5, 8, 6, 3, 5])
    monkeypatch.setattr(sensitivity.prediction, "divergence_of", lambda *_: next(losses))
    assert measured(model, made, FEW_TEXTS) == [2, 0.5, 2, 0]


def test_losses_that_are_not_finite_are_refused(model, made, monkeypatch):
    monkeypatch.setattr(sensitivity.prediction, "divergence_of", lambda *_: torch.tensor(torch.nan))
    with pytest.raises(RotationZooError, match="loss of keys in layer 0 is not finite"):
        measured(model, made, FEW_TEXTS)


# ---- what is compared


def test_answers_to_recall_questions_are_compared(folder):
    """The statements are in the stored tokens, in words that no evaluation uses."""
    tokenizer = load_tokenizer(folder)
    rows = read_corpus(Data(tokens=8192, length=1024), tokenizer).rows
    texts = sensitivity.write_texts(rows, Recipe(), tokenizer)
    answers = 0
    for text in texts:
        assert (text.stored, len(text.ids)) == (slice(64, text.positions[0] - 256), 1024)
        stored = tokenizer.decode(text.ids[text.stored])
        for _, run in itertools.groupby(enumerate(text.positions), lambda pair: pair[1] - pair[0]):
            answer = text.ids[[1 + position for _, position in run]]
            assert tokenizer.decode(answer) in stored
            answers += 1
        assert not re.findall(rf"\b({'|'.join(POOLS['judge'])})_", tokenizer.decode(text.ids))
    assert answers == 8 * len(sensitivity.ASKED)


def test_rows_too_short_for_questions_are_compared_at_their_last_tokens(folder):
    tokenizer = load_tokenizer(folder)
    rows = [torch.arange(2), torch.arange(400), torch.arange(300)]
    shortest, *longer = sensitivity.write_texts(rows, Recipe(), tokenizer)[::-1]
    assert (shortest.positions, shortest.stored) == ([1], slice(0, 1))
    for text, row in zip(longer, rows[2:0:-1], strict=True):
        length = len(row)
        assert torch.equal(text.ids, row)
        assert text.positions == [*range(length - 64, length)]
        assert text.stored == slice(64, length - 64 - length // 4)


# ---- a text is read once, and only the tokens after it for every layer and side


def fitted(model):
    """The geometry of a model, and rotations with some transform coding."""
    geometry = geometry_of(model, ROWS[0][None])
    statistics = collect(model, geometry, [ROWS[0][None]], FEW_TOKENS)
    return geometry, with_transforms(fit(statistics, FEW_TOKENS, geometry))


def losses(model):
    """The losses of all layers and sides, in order."""
    return [*sensitivity.measure_losses(model, *fitted(model), FEW_TEXTS, silent).values()]


@dataclass(frozen=True)
class OneSide(RotatedCodec):
    """A codec that leaves all sides but one as they are."""

    side: str = ""

    def keep_exact(self, rows, layer, side):
        return super().keep_exact(rows, layer, side) if side == self.side else rows

    def fake_quantize(self, rows, layer, side, format):
        return super().fake_quantize(rows, layer, side, format) if side == self.side else rows


@torch.no_grad()
def losses_of_whole_rows(model):
    """The same by their definition: whole rows go through a simulated cache, where tokens before
    the compared ones are a chunk that is read exact."""
    geometry, rotations = fitted(model)
    found = []
    for owner, side, _ in rotations.each():
        readers, parts = {layer.index for layer in geometry if layer.owner == owner}, []
        for text in FEW_TEXTS:
            chunk = {"prefill_chunk": text.positions[0], "prefill_layout": "window"}
            cache = CacheLayout(SEGMENTS, 4, 4, **chunk)
            exact = model(input_ids=text.ids[None], use_cache=False).logits
            one = OneSide(rotations, rounding="transform", side=side)
            with Simulation(one, cache, geometry, readers).running(model):
                stored = model(input_ids=text.ids[None], use_cache=False).logits
            parts.append(divergence_of(exact[0, text.positions], stored[0, text.positions]).mean())
        found.append(torch.stack(parts).mean().item())
    return found


# Sparse attention chooses other tokens in whole rows, and MiniMax is refused.
@families([name for name in CALIBRATED if name not in {"minimax", *SPARSE}])
def test_losses_are_those_of_whole_rows(name):
    model = build(name)
    measured = losses(model)
    assert max(measured) > 0
    # Measured: at most 5e-7 nats apart.
    assert measured == pytest.approx(losses_of_whole_rows(model), rel=1e-4, abs=1e-6)


@families(CALIBRATED)
def test_a_model_whose_cache_loses_count_is_refused(name):
    told = pytest.raises(UnsupportedModel, match="MiniMaxForCausalLM, whose own cache loses count")
    with told if name == "minimax" else nullcontext():
        sensitivity.check_cache(build(name), torch.arange(3, 35)[None])


@families([name for name in SPARSE if name in CALIBRATED])
def test_leaving_out_layers_changes_no_loss(name, monkeypatch):
    model = build(name)
    measured = losses(model)
    monkeypatch.setattr(sensitivity.prediction, "decoder_layers", lambda model: [])
    assert losses(model) == pytest.approx(measured, rel=1e-6, abs=1e-12)
