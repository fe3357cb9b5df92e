"""Recipes with a budget of bits: measured losses, bits for the layers that lose more, and the
caches and checks that read them."""

import itertools
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from support.architectures import CALIBRATED, LAYERS, SPARSE, build, families
from support.jobs import SMALL, job
from support.models import edited_weights, load_saved, load_tokenizer, save_family, save_tiny
from support.recipes import QUICK

from rotationzoo import api
from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.reductions import reduced_rotations
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.calibration import sensitivity
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.soundness import Claim
from rotationzoo.codec.bit_allocation import (
    COARSE,
    PER_BIT,
    Place,
    check_room,
    choose_bits,
    format_of_equal_bits,
    spend_bits,
)
from rotationzoo.codec.formats import FINE
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.size import codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError, UnsupportedModel, UsageError
from rotationzoo.geometry import Layer
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.prediction import divergence_of
from rotationzoo.progress import silent
from rotationzoo.recall.questions import POOLS
from rotationzoo.recipe import Data, Recipe
from rotationzoo.recipe.loading import PRESETS, from_dict, with_budget, with_feedback
from rotationzoo.rotations import LayerRotations, Rotation, Rotations
from rotationzoo.settings import CalibrationSettings
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.text.rows import read_corpus

BITS = 3.5
RECIPE = with_budget(QUICK.model_copy(update={"data": SMALL}), Budget(BITS))
FEW_TOKENS = Recipe(feedback=True, sink=4, recent=4)
ROWS = [torch.arange(48) % 59, torch.arange(40) % 7]
FEW_TEXTS = sensitivity.write_texts(ROWS, FEW_TOKENS, None)


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
    """An artifact with a budget, which no test may change."""
    return calibrate(job(folder, tmp_path_factory.mktemp("budget"), RECIPE))


def stored_bits(artifact, rotations):
    """Bits an element of a cache without exact tokens."""
    arm = RotatedCodec(rotations, rounding="feedback")
    cache = CacheLayout(FINE, sink=0, recent=0)
    return codec_bits(artifact.geometry, arm, cache, 1000)


def test_layers_that_lose_more_get_more_bits(made):
    first, second = made.rotations[0], made.rotations[1]
    for side in ("key", "value"):
        assert first[side].sensitivity > 10 * second[side].sensitivity >= 0
        assert first[side].fine_channels == 16 > second[side].fine_channels == 0


def sensitivities(model, made, texts):
    measured = sensitivity.measure_sensitivities(
        model, made.geometry, made.rotations, texts, None, silent
    )
    return [rotation.sensitivity.item() for _, _, rotation in measured.each()]


def test_noise_is_subtracted_and_texts_are_clamped_before_their_mean(model, made, monkeypatch):
    """What texts lose at each place, beyond a noise of 5: 1 and 3, -3 and 1, 4 and -2, 0 and 0."""
    losses = iter([5, 6, 2, 9, 5, 5, 8, 6, 3, 5])
    monkeypatch.setattr(
        sensitivity.prediction, "divergence_of", lambda *_: torch.tensor(next(losses))
    )
    assert sensitivities(model, made, FEW_TEXTS) == [2, 0.5, 2, 0]


def test_losses_that_are_not_finite_are_refused(model, made, monkeypatch):
    monkeypatch.setattr(sensitivity.prediction, "divergence_of", lambda *_: torch.tensor(torch.nan))
    with pytest.raises(RotationZooError, match="keys of layer 0 lose is not finite"):
        sensitivities(model, made, FEW_TEXTS)


def test_no_more_bits_are_spent_than_the_budget_has(made):
    least = stored_bits(made, spend_bits(made.rotations, Budget(3), RECIPE.group_size))
    assert least == pytest.approx(3)  # 2 bits and a float16 scale for 16 channels
    assert least < stored_bits(made, made.rotations) <= BITS
    assert format_of_equal_bits(made.rotations, FINE) == replace(FINE, fine_channels=8)  # of 16


def test_another_budget_needs_no_model(made):
    generous = reduced_rotations(made, False, (), Budget(4))
    assert {int(rotation.fine_channels) for _, _, rotation in generous.each()} == {0, 32}
    with pytest.raises(RotationZooError, match=r"a budget of 2\.5 bits is less") as error:
        reduced_rotations(made, False, (), Budget(2.5))
    assert error.value.hint == "give 3 or more, or --recipe transform"
    for bits in (float("nan"), 4.5, "many"):
        with pytest.raises(UsageError, match="bits = "):
            reduced_rotations(made, False, (), Budget(bits))


def test_sides_may_have_budgets_of_their_own(made):
    spent = spend_bits(made.rotations, Budget(key_bits=4, value_bits=3), None)
    for _, side, rotation in spent.each():
        assert rotation.fine_channels in {"key": (0, 32), "value": (0,)}[side]


def test_an_artifact_without_a_budget_says_how_to_make_one(folder, tmp_path):
    recipe = QUICK.model_copy(update={"data": SMALL})
    plain = calibrate(job(folder, tmp_path, recipe))
    with pytest.raises(RotationZooError, match="do not know what each layer loses") as error:
        reduced_rotations(plain, False, (), Budget(3))
    assert error.value.hint == "calibrate with --bits"


def test_a_budget_needs_error_feedback():
    with pytest.raises(RotationZooError, match="needs error feedback or transform coding"):
        from_dict({"extends": "hadamard", "bits": 2.5}, "the file")
    with pytest.raises(UsageError, match="needs error feedback or transform coding"):
        with_budget(with_feedback(PRESETS["oscar"], False), Budget(2.5))


def test_the_default_has_a_budget_that_options_and_engines_leave_out():
    def planned(**options):
        recipe = api.calibration_job(CalibrationSettings("demo", **options)).recipe
        return recipe.name, recipe.bits

    assert planned() == planned(engine="vllm") == ("transform", 2.5)
    assert planned(recipe="oscar") == ("oscar", 3.0)
    assert planned(quick=True) == planned(engine="sglang") == ("oscar-quick", None)
    assert planned(engine="sglang", bits=2.5) == ("oscar-2.5-bits", 2.5)
    assert planned(bits=2.25) == ("transform-2.25-bits", 2.25)
    assert planned(feedback=False) == ("oscar-nearest", None)
    assert planned(images="photo") == ("oscar", None)
    assert planned(device_map="auto") == ("oscar", 3.0), "which the plan leaves out"
    assert planned(recipe="hadamard", quick=True) == ("hadamard", None)
    with pytest.raises(UsageError, match="a quick calibration has no budget"):
        planned(quick=True, bits=2.5)
    with pytest.raises(UsageError, match="on text alone"):
        planned(images="photo", bits=2.5)
    for keys in ({"feedback": False}, {"data": {"audio": "sound"}}, {"bits": None}):
        assert from_dict(keys, "the file").bits is None
    of_file = from_dict({"key_bits": 3, "value_bits": 2.5}, "the file")
    assert of_file.bits is None
    chosen = with_budget(of_file, Budget(2.25))
    assert [chosen.bits, chosen.key_bits, chosen.value_bits] == [2.25, None, None]
    assert from_dict({"value_clip": 0.9}, "the file").bits == 3.0


def test_a_default_budget_that_cannot_be_is_left_out_with_a_note(tmp_path):
    """Heads of 8 channels take 4 bits with their scales; weights are spread; MiniMax is refused."""
    small = Data(tokens=512, length=64)
    narrow, minimax = save_tiny(tmp_path / "narrow", head_dim=8), tmp_path / "minimax"
    save_family("minimax", minimax)
    wanted = PRESETS["oscar"].model_copy(update={"data": small, "sink": 4, "recent": 8})
    for number, (model, how, says) in enumerate(
        [
            (narrow, {}, "scales take too much of a budget of 3"),
            (save_tiny(tmp_path / "wide"), {"device_map": "auto"}, "spread weights"),
            (minimax, {}, "MiniMaxForCausalLM, whose own cache loses count"),
        ]
    ):
        asked = job(model, tmp_path / str(number), wanted, **how)
        made = calibrate(replace(asked, fit_budget=True))
        assert made.recipe.bits is None
        assert not made.rotations.has_budget
        assert any(says in note for note in made.manifest.notes), made.manifest.notes


def test_verify_finds_bits_that_rows_have_no_room_for(made):
    def tamper(layer, side, rotation):
        return replace(rotation, fine_channels=torch.tensor(24))

    claim = Claim(made.recipe, made.geometry)
    problems = claim.content_problems(made.rotations.replace(tamper), made.statistics)
    assert any("no room for" in problem for problem in problems)


@pytest.mark.parametrize("budget", [{"bits": 3.5}, {"key_bits": 4, "value_bits": 3.5}])
def test_verify_finds_more_bits_than_the_budget_has(made, budget):
    recipe = made.recipe.model_copy(update={"bits": None, **budget})
    claim = Claim(recipe, made.geometry)
    spent = spend_bits(made.rotations, recipe.budget, recipe.group_size)
    assert claim.content_problems(spent, made.statistics) == []
    full = spend_bits(made.rotations, Budget(4), recipe.group_size)
    assert claim.content_problems(full, made.statistics) == [
        "more fine channels than 3.5 bits buy: layer 0"
    ]


def test_evaluation_measures_the_budget_and_baselines_in_its_bytes(folder, made):
    report = api.evaluate(
        str(folder), made, bits=3.5, tasks=[], tokens=1024, length=512, windows=[(4, 16)]
    )
    bits = {name: arm["bits_per_element"] for name, arm in report["arms"].items()}
    assert report["format"] == "fine"
    said = "The artifacts have a budget of 3.5 bits here, and not their own"
    assert said in report["notes"]
    assert bits["out+feedback"] <= bits["hadamard"] <= 3.51


@pytest.mark.parametrize("dim", [16, 56, 72, 80, 112, 192, 576])
def test_the_least_budget_that_a_hint_names_is_one(dim):
    layers = [Layer(index, index, 8, 3, dim, dim) for index in range(7)]
    with pytest.raises(RotationZooError) as error:
        check_room(Budget(2.001), None, layers)
    least = float(error.value.hint.split()[1])
    assert 2 + 16 / dim <= least + 1e-9 < 2 + 16 / dim + 0.001
    check_room(Budget(least), None, layers)


def test_baselines_get_the_bytes_of_a_budget():
    def format_of(*rows):
        sides = (
            Rotation(torch.eye(dim)[None], torch.ones(2), fine_channels=torch.tensor(more))
            for dim, more in rows
        )
        format = format_of_equal_bits(Rotations({0: LayerRotations(*sides)}), FINE)
        return format.bits, format.fine_channels

    assert format_of((192, 48), (128, 0)) == (2, 24)
    assert format_of((192, 192), (128, 0)) == (2, 96)
    assert format_of((192, 192), (128, 120)) == (2, 128)  # no more than the shortest rows have
    assert format_of((192, 192), (128, 128)) == (3, 0)
    assert format_of((128, 6 * 128), (128, 0)) == (8, 0)  # the next that codes may have
    assert format_of((128, 2 * 128), (128, 128)) == (3, 64)


# ---- what is chosen costs no more than anything else that the budget buys


def cost(places, chosen):
    """What is lost, and the bits that rows of all places take more."""
    lost = sum(
        place.loss * PER_BIT ** (bits / place.dim)
        for place, bits in zip(places, chosen, strict=True)
    )
    return lost, sum(place.heads * bits for place, bits in zip(places, chosen, strict=True))


@pytest.mark.parametrize("extra", [0, 0.1, 0.3, 0.5, 0.9, 1])
def test_no_other_choice_of_the_budget_costs_less(extra):
    places = [Place(0.02, 2, 32), Place(0.003, 2, 32), Place(0.0005, 4, 16), Place(0.002, 2, 64)]
    budget = extra * sum(place.elements for place in places)
    chosen = choose_bits(places, extra)
    lost, spent = cost(places, chosen)
    assert spent <= budget
    others = [
        cost(places, other) for other in itertools.product(*(place.choices for place in places))
    ]
    # The solver stops at a solution within 1e-5 of the best.
    assert lost <= min(lost for lost, spent in others if spent <= budget) * (1 + 1e-4)


MANY = [Place(1.6, 3, 64), *[Place(0.01, 3, 64)] * 29]


@pytest.mark.parametrize(
    ("places", "extra", "chosen"),
    [
        # No more than rows have room for, also where there is more to spend.
        ([Place(1, 1, 64), Place(1, 1, 128), Place(1, 1, 256)], 10, [6 * 64, 6 * 128, 2 * 256]),
        # Nats a token may be 1e-9, which is below the solver's own tolerances.
        ([Place(1e-9, 1, 64), Place(1e-12, 1, 64)], 0.5, [64, 0]),
        # A layer that loses nearly all gets four or eight bits.
        (MANY, 0.1, [2 * 64]),
        (MANY, 0.25, [6 * 64]),
    ],
    ids=["room", "small losses", "four bits", "eight bits"],
)
def test_the_first_places_get_these_bits(places, extra, chosen):
    assert choose_bits(places, extra)[: len(chosen)] == chosen


def test_bits_that_nobody_needs_more_go_to_losses_too_small_to_measure():
    places = [Place(1, 1, 64), Place(0, 1, 64), Place(0.1, 1, 64)]
    assert choose_bits(places, 0.9)[:1] == [128]
    assert sum(choose_bits(places, 2)) == 6 * 64
    assert len(choose_bits([Place(0, 1, 64)] * 3, 0.5)) == 3


# ---- what is compared


def test_answers_to_recall_questions_are_compared(folder):
    """Statements stand in what is stored, in words that no evaluation asks for."""
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


# ---- a text is read once, and only what follows it is read for every layer and side


def fitted(model):
    """The geometry of a model, and its rotations."""
    geometry = geometry_of(model, ROWS[0][None])
    statistics = collect(model, geometry, [ROWS[0][None]], FEW_TOKENS)
    return geometry, fit(statistics, FEW_TOKENS, geometry)


def losses(model):
    """The sensitivities of all layers and sides, in order."""
    measured = sensitivity.measure_sensitivities(model, *fitted(model), FEW_TEXTS, None, silent)
    return [rotation.sensitivity.item() for _, _, rotation in measured.each()]


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
            cache = CacheLayout(
                COARSE, 4, 4, prefill_chunk=text.positions[0], prefill_layout="window"
            )
            exact = model(input_ids=text.ids[None], use_cache=False).logits
            one = OneSide(rotations, rounding="feedback", side=side)
            with Simulation(one, cache, geometry, readers).running(model):
                stored = model(input_ids=text.ids[None], use_cache=False).logits
            parts.append(divergence_of(exact[0, text.positions], stored[0, text.positions]).mean())
        found.append(torch.stack(parts).mean().item())
    return found


# Sparse attention chooses other tokens than in whole rows, and MiniMax is refused.
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


def test_layers_before_the_measured_one_do_not_run(monkeypatch):
    model, calls = build("llama"), []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    losses(model)
    everything, calls[:] = len(calls), []
    monkeypatch.setattr(sensitivity.prediction, "decoder_layers", lambda model: [])
    losses(model)
    # Of 4 layers, a text runs 4, 3, 2 and 1 in place of 4 each time, for keys and for values.
    assert len(calls) - everything == len(ROWS) * 2 * (LAYERS**2 - (4 + 3 + 2 + 1))
