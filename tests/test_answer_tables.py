"""The tables of the answer benchmark: every recipe loads, and two arms are compared on the
questions that both were asked."""

import json

import answer_recipes
import compare_answers
import pytest
from compare_answers import EXACT


def task(correct: str, **more):
    return {
        "correct": correct,
        "log_probabilities": [-1.0 + int(digit) for digit in correct],
        **more,
    }


def report(**arms):
    exact = {
        "needles": task("11111100", can_do=True, prompts=[4, 4], distances=[300] * 4 + [700] * 4)
    }
    exact["copy"] = task("0000", can_do=False, prompts=[4], distances=[300] * 4)
    return {
        "format": "sglang",
        "exact": {"bits": 16, "tasks": exact, "text_losses": [1.0, 3.0]},
        "arms": {
            name: {"bits": 5, "tasks": {"needles": task(correct)}, "text_losses": [1.5]}
            for name, correct in arms.items()
        },
    }


def test_every_recipe_is_valid_and_has_one_text():
    recipes = answer_recipes.recipes()
    assert {recipe.data for recipe in recipes.values()} == {recipes["best"].data}
    known = {*recipes, *answer_recipes.BASELINES, *answer_recipes.LIBRARIES}
    assert known.issuperset(answer_recipes.DEFAULT)
    for names in answer_recipes.ARMS.values():
        assert known.issuperset(names)


def test_arms_are_compared_on_common_questions():
    measured = compare_answers.read("m", report(few="1000", all="11000100"))
    assert measured.lost("few", "share") == 0.75
    assert measured.lost("all", "share") == pytest.approx(3 / 8)
    assert measured.lost("all", "share", like="few") == 0.5
    assert measured.difference("all", "few", "share") == (0.25, 0.0)
    difference, error = measured.difference(EXACT, "all", "share")
    assert difference == pytest.approx(3 / 8)
    assert error == pytest.approx(1 / 8)
    # The first text alone, because the arm read no other.
    assert measured.perplexity_increase("few") == pytest.approx(0.6487, abs=1e-4)


def test_tables_join_the_files_of_a_model(tmp_path, capsys, monkeypatch):
    for part, arms in {"a": {"base": "11001000"}, "b": {"best": "11101000"}}.items():
        content = {"model": "m", "settings": {"2048": report(**arms)}}
        (tmp_path / f"m.{part}.json").write_text(json.dumps(content))
    options = ["--base", "base", "--chosen", "best", "--near", "exact;base;best"]
    monkeypatch.setattr("sys.argv", ["compare_answers", str(tmp_path), *options])
    compare_answers.main()
    table = capsys.readouterr().out
    assert "| best | 50.0 |" in table
    # 2 of 8 questions lost beside 3 of 8.
    assert "| best | 1 | 25.00 | 0.67 |" in table
    assert "| base | 12.50 ±12.50 | 12.50 ±12.50 |" in table
    assert "| best | 75.0 | 25.0 |" in table
