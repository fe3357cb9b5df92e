"""Recipes that search, as whole jobs."""

import pytest

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.cli.search_view import show_search
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import PRESETS, Data, Search, from_dict


def test_best_makes_an_artifact_of_the_demo_model(tmp_path):
    settings = Search(steps=20, starts=1, queries=16)
    recipe = PRESETS["best"].model_copy(
        update={"data": Data(tokens=8192, length=1024), "search": settings}
    )
    artifact = calibrate(Job("demo", recipe, tmp_path / "best", device="cpu"))
    assert verify(artifact, "demo").ok, verify(artifact, "demo").problems
    found = artifact.content["search"]["model"]
    assert found["trimmed"] <= found["by_side"][found["kept"]], (
        "where the clip ratios began is tried, too"
    )
    for side in ("key", "value"):
        tried = {float(ratio): divergence for ratio, divergence in found[side]["by_clip"].items()}
        best = found[side]["clip"]
        assert tried[best] == min(tried.values())
        assert {round(best - 0.02, 4), round(best + 0.02, 4)} - {1.02} <= set(tried), (
            "neither neighbour is better"
        )
    assert found["kept"] == "own" or found["by_side"][found["kept"]] < found["by_side"]["own"]
    assert "layers.0.key.mean" in artifact.rotation_tensors()
    clips = (
        f"clip ratios {found['key']['clip']:g} for keys and {found['value']['clip']:g} for values"
    )
    assert clips in (artifact.folder / "README.md").read_text(), (
        "what is served, not where the search began"
    )
    again = calibrate(Job("demo", recipe, tmp_path / "again", device="cpu"))
    assert again.identity == artifact.identity, "the same bytes"
    assert not (tmp_path / "best.checkpoint.safetensors").exists()
    kept = calibrate(Job("demo", recipe, tmp_path / "none", device="cpu", budget=0.0))
    sides = [
        layer[side]
        for layer in kept.content["search"]["layers"].values()
        for side in ("key", "value")
    ]
    assert not any("curve" in side for side in sides), "no time to learn"
    assert [len(kept.content["search"]["model"][side]["by_clip"]) for side in ("key", "value")] == [
        1,
        1,
    ], "or for clip ratios"


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
    assert ("basis of keys" in shown) == (kept in ("keys", "both"))
    assert ("basis of values" in shown) == (kept in ("values", "both"))
    assert ("chosen on text" in shown) == (kept != "own")
