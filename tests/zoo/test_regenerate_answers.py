"""New rotations that answer worse than the published ones are refused, whatever their
perplexity."""

import pytest
from support import reports

from rotationzoo.artifact.measured import Measured, MeasuredArm, Window
from rotationzoo.errors import RotationZooError
from rotationzoo.zoo.regenerate import compare_rotations

QUESTIONS, PUSH = 32, "rotationzoo push new someone/zoo"


def arm(answered: int, log_probability: float = -2.0, loss: float = 3.0) -> MeasuredArm:
    """An arm of a report with `QUESTIONS` questions and four texts, all with a little noise."""
    noise = [0.001 * (i % 3) for i in range(QUESTIONS)]
    logs = [log_probability * (1 + each) for each in noise]
    correct = "1" * answered + "0" * (QUESTIONS - answered)
    losses = [loss * (1 + each) for each in noise[:4]]
    return reports.arm("some", losses, tasks={"copy": reports.recall(correct, logs)})


def compare(new: MeasuredArm, published: MeasuredArm) -> dict:
    """The new rotations stand last, because nothing is to be read from the order of arms."""
    made = {"identity": arm(0)}
    for name, each in (("published", published), ("new", new)):
        about = {"name": name, "kind": "artifact", "artifact": name}
        made[name] = each.model_copy(update=about)
    window = Window.model_construct(arms=made)
    exact = reports.exact([100] * 4, {"copy": [1] * QUESTIONS})
    measured = Measured.model_construct(windows=[window], exact=exact)
    return compare_rotations(measured, ("new", "published"), "someone/model", PUSH)


def test_fewer_answers_are_refused_although_the_perplexity_is_better():
    with pytest.raises(RotationZooError, match="answer worse than the published ones") as refusal:
        compare(arm(20, loss=2.9), arm(32))
    assert "20 of 32 questions compared with 32, p 0.00098" in str(refusal.value)
    assert refusal.value.hint == f"to publish them all the same: {PUSH}"


def test_less_likely_answers_are_refused():
    with pytest.raises(RotationZooError, match=r"right answers have -0\.50 nats, p "):
        compare(arm(30, -2.5), arm(30, -2.0))
    assert compare(arm(30, -2.04), arm(30, -2.0))["answers"]["outcome"] == "less likely"


def test_perplexity_decides_where_answers_do_not():
    with pytest.raises(RotationZooError, match=r"are worse .*: perplexity \+"):
        compare(arm(30, loss=3.1), arm(31))
    figures = compare(arm(32, loss=3.1), arm(20))
    assert figures["answers"]["outcome"] == "more"
    assert (figures["answers"]["answered"], figures["answers"]["other_answered"]) == (32, 20)
    assert figures["log_perplexity_difference"] == pytest.approx(0.1, rel=0.01)


def test_without_questions_perplexity_decides_alone():
    new, published = arm(0, loss=3.1), arm(32)
    new, published = (each.model_copy(update={"tasks": {}}) for each in (new, published))
    with pytest.raises(RotationZooError, match="perplexity"):
        compare(new, published)
    assert compare(published, new)["answers"] is None
