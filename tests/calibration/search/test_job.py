"""Recipes that search, as whole jobs."""

from contextlib import ExitStack

import pytest
from support.full_memory import room_for

from rotationzoo.calibration import model_run
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.cli.search_view import search_sentences, show_search
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.recipe import PRESETS, Data, Search, from_dict

# Small windows, so that short rows have room for questions.
SHORT = {"sink": 16, "recent": 32, "data": Data(tokens=1536, length=512)}


def test_best_makes_an_artifact_of_the_demo_model(tmp_path):
    settings = Search(steps=2, starts=1, queries=8, prompts=1, equalize=(True,))
    recipe = PRESETS["best"].model_copy(update={**SHORT, "search": settings})
    artifact = calibrate(Job("demo", recipe, tmp_path / "best", device="cpu"))
    assert verify(artifact, "demo").ok, verify(artifact, "demo").problems
    chosen = artifact.manifest.search.choice
    assert chosen.criterion.startswith("answers to generated questions")
    assert {"needles", "key-value"} <= set(chosen.probes.tasks)
    assert chosen.probes.questions > 0
    assert all(candidate.answers_lost is not None for candidate in chosen.candidates)
    found = artifact.content["search"]["model"]
    for side in ("key", "value"):
        assert f"{found[side]['clip']:g}" in found[side]["by_clip"]
    clips = (
        f"clip ratios {found['key']['clip']:g} for keys and {found['value']['clip']:g} for values"
    )
    assert clips in (artifact.folder / "README.md").read_text(), (
        "what is served, not where the search began"
    )
    assert "layers.0.key.mean" in artifact.rotation_tensors()
    equalized = artifact.recipe.equalize
    assert ("layers.0.key.equalizer" in artifact.rotation_tensors()) == equalized
    assert artifact.manifest.identity["recipe"] == recipe.hash
    assert not (tmp_path / "best.checkpoint.safetensors").exists()
    passes = artifact.manifest.run.passes
    assert passes["statistics"] == 2 * 512, "one row is held out"
    assert passes["samples"] == 3 * 512, "of all rows, in one pass"
    assert passes["statistics"] + passes["samples"] <= 2 * 1536, "twice the passes of oscar"
    assert min(passes["predictions"], passes["answers"]) > 512


def test_a_search_goes_on_with_the_batch_that_fitted(tmp_path, monkeypatch):
    """After a stop, too, and then with the passes that were counted before it."""
    data = Data(tokens=1024, length=128)
    recipe = PRESETS["oscar-clip"].model_copy(update={**SHORT, "data": data})
    load, tasks = loading.load, []

    def load_on_a_small_device(*arguments):
        model = load(*arguments)
        small_device.enter_context(room_for(model, 3))
        return model

    def stop(task, *_):
        tasks.append((task.batch, task.passes.tokens["statistics"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load", load_on_a_small_device)
    monkeypatch.setattr(model_run, "search_rotations", stop)
    for _ in range(2):
        with ExitStack() as small_device, pytest.raises(KeyboardInterrupt):
            calibrate(Job("demo", recipe, tmp_path / "out", device="cpu", batch=8))
    # Two of the eight rows are held out. The first run failed with the others at once, and the
    # second reads none of them.
    assert tasks == 2 * [(3, 128 * (6 + 3 + 3))]


def test_a_budget_leaves_out_learning_and_clip_ratios(tmp_path):
    settings = Search(steps=2, starts=1, queries=8, prompts=0)
    recipe = PRESETS["best"].model_copy(update={**SHORT, "search": settings})
    kept = calibrate(Job("demo", recipe, tmp_path / "none", device="cpu", budget=0.0))
    search = kept.content["search"]
    sides = [layer[side] for layer in search["layers"].values() for side in ("key", "value")]
    assert not any("curve" in side for side in sides), "no time to learn"
    assert [len(search["model"][side]["by_clip"]) for side in ("key", "value")] == [1, 1]
    assert "asks for no prompts" in search["choice"]["criterion"]


def test_a_budget_is_for_recipes_that_search(inside):
    result = inside("calibrate", "demo", "--recipe", "oscar", "--budget", "5")
    assert result.returncode == 2
    assert "--recipe best" in result.stderr


def test_a_search_is_for_heads():
    with pytest.raises(RotationZooError, match="a search chooses for every head"):
        from_dict({"extends": "best", "pooling": "layer"}, "mine.yaml")


def test_too_little_text_to_choose_on(tmp_path):
    recipe = PRESETS["best"].model_copy(update={"data": Data(tokens=1024, length=512)})
    with pytest.raises(RotationZooError, match="of 2 there are none to spare"):
        calibrate(Job("demo", recipe, tmp_path / "out", device="cpu"))
    recipe = PRESETS["best"].model_copy(update={"data": Data(tokens=1024, length=256)})
    with pytest.raises(RotationZooError, match="no held-out row is longer than 320 tokens"):
        calibrate(Job("demo", recipe, tmp_path / "out", device="cpu"))


@pytest.mark.parametrize("kept", ["own", "keys", "values", "both"])
def test_what_a_search_discarded_is_not_shown_as_chosen(kept, capsys):
    """A table of what was chosen holds the sides that are served, and no table at all where none
    is."""
    sides = {
        side: {"candidate": [f"basis of {side}s"], "chosen": [0.5]} for side in ("key", "value")
    }
    model = {"kept": kept, "by_side": {"own": 0.2, "both": 0.1}, "trimmed": 0.1}
    model |= {side: {"clip": 0.9} for side in ("key", "value")}
    show_search({"layers": {"0": sides}, "model": model})
    shown = capsys.readouterr().out
    assert "0.2000 without a search" in shown, "earlier versions chose by predictions alone"
    assert ("basis of keys" in shown) == (kept in ("keys", "both"))
    assert ("basis of values" in shown) == (kept in ("values", "both"))
    assert ("chosen on text" in shown) == (kept != "own")


def test_the_candidates_and_the_test_are_shown(capsys):
    tried = [
        {"name": "own", "divergence": 0.1, "answer_loss": 0.5, "answers_lost": 0.25},
        {"name": "other", "divergence": 0.2},
    ]
    model = {"kept": "own", "by_side": {}, "trimmed": 0.1}
    choice = {"criterion": "answers", "candidates": tried, "test": tried}
    choice |= {"taken": "own", "baseline": "other", "winner": "own"}
    show_search({"layers": {}, "model": model, "choice": choice})
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "own 25.0% 0.5000 0.1000" in " ".join(shown.split())
    assert "Chosen: own" in shown
    assert "25.0% of the answers lost, 0.5000 nats a token of them" in shown
    assert "as the recipe is without a search: predictions diverge by 0.2000 nats" in shown


@pytest.mark.parametrize("winner", ["own", "other"])
def test_a_search_that_changes_nothing_says_so_in_one_sentence(winner):
    tried = [{"name": "own", "divergence": 0.1}, {"name": "other", "divergence": 0.2}]
    choice = {"criterion": "answers", "candidates": tried, "test": tried}
    choice |= {"taken": "own", "baseline": "own", "winner": winner}
    (sentence,) = search_sentences({"layers": {}, "model": {}, "choice": choice})
    found = "found nothing better than" if winner == "own" else "takes"
    assert sentence.startswith(f"The search {found} the recipe's own rotations (own)")
    assert ("other won by answers, but failed its test" in sentence) == (winner == "other")
    assert sentence.count("predictions diverge by 0.1000 nats") == 1
    assert ("beside predictions diverge by 0.2000 nats" in sentence) == (winner == "other")
