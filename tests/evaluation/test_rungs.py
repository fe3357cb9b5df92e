"""The fewest bits that keep what is asked for: which rung is chosen, and the artifact of it."""

import random
from functools import partial
from pathlib import Path

import pytest
from support.jobs import rotation_bytes
from support.reports import SIZE, auto, decide_on, draw_answers

from rotationzoo.api import calibrate, evaluate
from rotationzoo.artifact.scores import Action, Decision
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import UsageError
from rotationzoo.evaluation import decision as decisions
from rotationzoo.evaluation import rungs
from rotationzoo.evaluation.decision import Rule
from rotationzoo.evaluation.rungs import ask_rungs, choose_rung, find_rungs
from rotationzoo.evaluation.tasks.prompts import LOOKS

SMALL = {"tokens": 1024, "length": 512, "device": "cpu"}
"""Text of the model `induction`, which is quick to read."""


def decided(actions: list[Action]) -> list[Decision]:
    """Decisions on as many rungs, whose arms are their numbers."""
    made = partial(Decision, level=0.05, words=[])
    return [made(arm=str(number), action=action) for number, action in enumerate(actions)]


@pytest.mark.parametrize(
    ("actions", "chosen", "asked"),
    [
        (["serve", "serve", "serve", "serve", "serve"], "0", "210"),
        (["refuse", "ask", "serve", "serve", "serve"], "2", "21"),
        (["serve", "ask", "serve", "serve", "serve"], "2", "21"),
        (["serve", "serve", "ask", "serve", "serve"], "3", "243"),
        (["serve", "serve", "refuse", "serve", "ask"], "4", "24"),
        (["ask", "serve"], "1", "10"),
        (["serve", "ask"], "1", "1"),
        (["ask"], "0", "0"),
    ],
)
def test_bits_are_asked_from_the_middle_on_as_long_as_they_count(actions, chosen, asked):
    made, order = decided(actions), []

    def ask(name: str) -> Decision:
        order.append(name)
        return made[int(name)]

    decisions = ask_rungs([each.arm for each in made], ask)
    assert choose_rung(decisions).arm == chosen
    assert "".join(order) == asked
    assert decisions == [made[int(name)] for name in sorted(asked)]


def climb(seed: int, shares: tuple[float, ...]) -> Decision:
    """The decision on the chosen rung, where arms keep these shares of four tasks."""
    arms = draw_answers(random.Random(seed), 4 * LOOKS[-1] // SIZE, *shares)

    def ask(name: str) -> Decision:
        for questions in LOOKS:
            digits = arms[int(name)][: 4 * questions]
            made = decide_on({name: digits}, Rule(level=auto(questions).level / 2))
            if made.action != "ask":
                break
        return made

    return choose_rung(ask_rungs(list(map(str, range(len(shares)))), ask))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shares", "fewest"),
    [
        # The first rung that keeps 90 %, or none. Of 100 seeds, none chose fewer bits; these chose:
        ((0.6, 0.85, 0.89, 0.93, 0.97), 3),  # the fourth 94, the fifth 6
        ((0.88, 0.885, 0.89, 0.89, 0.895), None),  # none 100
        ((0.7, 0.8, 0.85, 0.88, 0.89), None),  # none 100
        ((0.95, 0.97, 0.98, 0.99, 0.99), 0),  # the first 100
    ],
)
def test_what_is_chosen_keeps_as_much_in_19_of_20_seeds(shares, fewest):
    seeds = 60
    made = [climb(seed, shares) for seed in range(seeds)]
    served = [int(each.arm) for each in made if each.action == "serve"]
    assert sum(fewest is None or arm < fewest for arm in served) <= 0.05 * seeds


@pytest.fixture(scope="module")
def budgeted(induction, tmp_path_factory) -> Artifact:
    folder = tmp_path_factory.mktemp("rungs") / "mine"
    return calibrate(str(induction), output=folder, recipe="attention", bits=3.5, **SMALL)


def test_the_rungs_are_those_of_an_artifact_with_a_budget(budgeted, artifacts):
    assert [each.bits for each in find_rungs([budgeted.folder])] == [2.0, 2.25, 2.5, 3.0, 3.5, 4.0]
    assert find_rungs(artifacts[1:]) == ()
    with pytest.raises(UsageError, match="for a single artifact"):
        find_rungs(artifacts)


def ask(model: Path, artifact: Artifact, keep: float):
    asked = {"tasks": ["quote"], "lengths": [512], "questions": 8, "tokens": 512}
    options = SMALL | asked
    return evaluate(str(model), artifact, save=True, fewest_bits=True, keep=keep, **options)


@pytest.mark.thorough
def test_the_chosen_bits_become_an_artifact_with_its_report(induction, budgeted, monkeypatch):
    monkeypatch.setattr(decisions, "FEWEST_ANSWERS", 4)
    monkeypatch.setattr(rungs, "RUNGS", (2.25, 4.0))
    report = ask(induction, budgeted, keep=5)
    assert list(report["arms"]) == ["mine-2.25-bits", "mine-2.25-bits+transform"]
    (note,) = (note for note in report["notes"] if "enough" in note)
    assert note.count("enough") == 2, "from the middle on"
    assert "mine keeps" in note
    written = Artifact.open(budgeted.folder.with_name("mine-2.25-bits"))
    assert written.measured.window.verdict.decisions[0].action == "serve"
    folder, options = budgeted.folder.with_name("again"), SMALL | {"recipe": "attention"}
    again = calibrate(str(induction), output=folder, bits=2.25, **options)
    assert rotation_bytes(written) == rotation_bytes(again)
    assert written.recipe == again.recipe


def test_bits_that_keep_too_little_are_not_written(induction, budgeted, monkeypatch):
    monkeypatch.setattr(rungs, "RUNGS", (4.0,))
    report = ask(induction, budgeted, keep=99.9)
    assert report["verdict"]["decisions"][0]["action"] != "serve"
    assert not budgeted.folder.with_name("mine-4-bits").exists()
