"""A search that looks at answers, on a model for which predictions favour what loses them."""

from dataclasses import replace

import pytest
import torch
from support.lookups import filler_rows, lookup_model, lookup_prompts
from support.searches import CACHE, search_recipe

from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.search import run
from rotationzoo.calibration.search.answer_loss import AnswerLoss
from rotationzoo.calibration.search.model_divergence import ModelDivergence
from rotationzoo.calibration.search.probes import Trial
from rotationzoo.calibration.search.run import search_rotations
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.model.geometry import geometry_of

ROWS = filler_rows(10, 40)
# Where the search begins: this clips nothing, and neither does .98.
KEPT = 0.96
# The largest of 16 channels is clipped.
CLIPPED = 0.92


@pytest.fixture(scope="module")
def lookups() -> SearchTask:
    """A search for the clip ratios of rows as they are, unrotated."""
    model = lookup_model()
    geometry = geometry_of(model)
    changes = {"composition": "identity", "center_keys": False}
    clips = {"key_clip": KEPT, "value_clip": 1.0}
    recipe = search_recipe(heads=False).model_copy(update=changes | clips)
    statistics = collect(model, geometry, [torch.stack(ROWS[:2])], recipe)
    baseline = fit(statistics, recipe, geometry)
    return SearchTask(model, geometry, recipe, statistics, baseline, ROWS[:2], ROWS[2:])


@pytest.fixture
def ask(monkeypatch):
    """A function that makes searches ask, while they choose, test, or both."""

    def make(*parts: str) -> None:
        def write_probes(task, able, part):
            return lookup_prompts(4, 48, seed=len(part)) if part in parts else []

        trial = Trial({"needles": 1.0, "copy": 0.0})
        monkeypatch.setattr(run, "try_tasks", lambda task: trial)
        monkeypatch.setattr(run, "write_probes", write_probes)

    return make


def key_clip(result) -> float:
    """The clip ratio of keys that a search chose, of which the record knows, too."""
    clip = result.rotations[0].key.clip[0].item()
    assert result.record["model"]["key"]["clip"] == clip
    return clip


def lost(task: SearchTask, rotations) -> float:
    """The share of new answers that rotations lose."""
    prompts = lookup_prompts(4, 48, seed=99)
    _, shares = AnswerLoss(task.model, task.geometry, CACHE, None, prompts).measure(rotations)
    return shares.mean().item()


def test_predictions_favour_what_loses_every_answer(lookups):
    result = search_rotations(lookups)
    assert key_clip(result) <= CLIPPED
    assert result.record["choice"]["criterion"].startswith("predictions on held-out rows")
    assert lost(lookups, result.rotations) == 1


def test_answers_come_first(lookups, ask):
    ask("choosing", "testing")
    result = search_rotations(lookups)
    chosen = result.record["choice"]
    assert key_clip(result) == KEPT
    assert chosen["criterion"].startswith("answers to generated questions")
    assert lost(lookups, result.rotations) == 0
    tried = result.record["model"]["key"]["by_clip"]
    kept, clipped = tried[f"{KEPT:g}"], tried[f"{CLIPPED:g}"]
    assert (kept["answers_lost"], clipped["answers_lost"]) == (0, 1)
    assert kept["divergence"] > 10 * clipped["divergence"]  # measured 1.14 and .015
    probes = chosen["probes"]
    assert (probes["tasks"], probes["prompts"], probes["questions"]) == (["needles"], 4, 16)


def test_predictions_decide_between_equal_answers(lookups, ask):
    """The Hadamard matrix keeps all answers, too, and disturbs less."""
    ask("choosing", "testing")
    recipe = lookups.recipe
    search = recipe.search.model_copy(update={"composition": ("hadamard",)})
    recipe = recipe.model_copy(update={"search": search})
    result = search_rotations(replace(lookups, recipe=recipe))
    assert result.recipe == recipe.model_copy(update={"composition": "hadamard"})
    assert result.record["choice"]["runner_up"].startswith(f"identity, clip {KEPT}/")
    assert lost(lookups, result.rotations) == 0


def test_a_winner_that_fails_its_test_is_not_taken(lookups, ask):
    """What only seemed better loses to the recipe's own rotations on questions that did not choose
    it."""
    ask("testing")
    result = search_rotations(lookups)
    chosen = result.record["choice"]
    assert chosen["winner"] != chosen["taken"]
    assert chosen["taken"] == chosen["baseline"] == f"identity, clip {KEPT}/1"
    assert result.record["model"]["key"] == {
        "clip": KEPT,
        "by_clip": {f"{KEPT}": result.record["model"]["value"]["by_clip"]["1"]},
    }
    assert lost(lookups, result.rotations) == 0


def test_a_model_that_can_do_no_task_is_judged_by_its_predictions(lookups, monkeypatch):
    trial = Trial({"needles": 0.125, "copy": 0.0}, {"quote": "too short"})
    assert trial.able == []
    monkeypatch.setattr(run, "try_tasks", lambda task: trial)
    chosen = search_rotations(replace(lookups, tokenizer=object())).record["choice"]
    assert chosen["criterion"].endswith("can do none of the recall tasks that were tried")
    assert chosen["probes"]["tried"] == {"needles": 0.125, "copy": 0.0}
    assert "answer_loss" not in chosen["candidates"][0]


def test_a_stopped_choice_measures_nothing_twice(lookups, ask, monkeypatch, tmp_path):
    ask("choosing", "testing")
    measured = []
    measure = ModelDivergence.measure

    def search(stop=None, checkpoint=None):
        def counted(self, candidates, tell):
            if len(measured) == stop:
                raise KeyboardInterrupt
            measured.append(len(candidates))
            return measure(self, candidates, tell)

        monkeypatch.setattr(ModelDivergence, "measure", counted)
        return search_rotations(lookups, checkpoint=checkpoint)

    whole, count = search(), len(measured)
    measured.clear()
    for stop in (1, 3, None):
        checkpoint = Checkpoint(tmp_path / "out.checkpoint.safetensors", {"job": "one"})
        if stop is None:
            again = search(stop, checkpoint)
        else:
            with pytest.raises(KeyboardInterrupt):
                search(stop, checkpoint)
    assert len(measured) == count >= 4
    assert again.record == whole.record
    assert key_clip(again) == key_clip(whole)
    checkpoint.remove()
    assert not list(tmp_path.iterdir())


def test_only_answers_that_the_exact_model_gives_can_be_lost(lookups):
    settings = lookups.model, lookups.geometry
    good, spoilt = lookup_prompts(2, 48)
    spoilt.ids[spoilt.questions[0].answer] += 4  # a filler, which the model does not answer
    loss = AnswerLoss(*settings, CACHE, None, [good, spoilt])
    assert loss.questions == 7
    assert loss.measure(lookups.baseline.with_clip("key", CLIPPED))[1].tolist() == [1, 1]
    exact = AnswerLoss(*settings, Cache(sink=48, recent=4), None, [good, spoilt])
    nats, shares = exact.measure(lookups.baseline.with_clip("key", CLIPPED))
    assert shares.tolist() == [0, 0]
    assert nats.abs().max() < 1e-6, "nothing is quantized"
