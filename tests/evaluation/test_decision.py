"""The decision on an artifact: when it is made, how often it is wrong, and in what words."""

import random

import pytest
from support.reports import recall

from rotationzoo.artifact.scores import Decision, ExactLengthScore, ExactTaskRecall
from rotationzoo.evaluation.decision import MARGIN, decide
from rotationzoo.evaluation.tasks.prompts import LOOKS

SIZE = 8  # questions of a prompt
NAMES = "mine", "identity", "hadamard"


def decision(arms: dict[str, str], looks: int = 1, right: str = "") -> Decision:
    """The decision on the arm `mine`, where each arm has a digit for each question."""
    correct = right or "1" * len(arms["mine"])
    prompts = [SIZE] * (len(correct) // SIZE)
    lengths = [ExactLengthScore.model_construct(length=0, questions=len(correct), can_do=True)]
    asked = {"prompts": prompts, "by_length": lengths}
    exact = {"copy": ExactTaskRecall.model_construct(correct=correct, **asked)}
    answers = {}
    for name, digits in arms.items():
        answers[name] = {"copy": recall(digits, []).model_copy(update={"by_length": lengths})}
    return decide("mine", answers, exact, len(correct), looks)


def drawn(draw: random.Random, prompts: int, *shares: float) -> list[str]:
    """The answers of arms that answer such shares: prompts are harder or easier for all of them."""
    ease = [draw.uniform(-0.15, 0.15) for _ in range(prompts)]
    arms = []
    for share in shares:
        chances = [share + each for each in ease for _ in range(SIZE)]
        arms.append("".join("01"[draw.random() < chance] for chance in chances))
    return arms


def ask_until_made(seed: int, *shares: float) -> Decision:
    """A decision as `--questions auto` makes it, of an arm and both rivals."""
    arms = drawn(random.Random(seed), 4 * LOOKS[-1] // SIZE, *shares)
    for questions in LOOKS:
        asked = [digits[: 4 * questions] for digits in arms]
        made = decision(dict(zip(NAMES, asked, strict=True)), len(LOOKS))
        if made.action != "ask":
            break
    return made


@pytest.mark.thorough
def test_looks_together_keep_the_level():
    """Arms that answer equally are called different at any of the looks in at most 5 % of
    evaluations: 6 of 400 are measured."""
    found = 0
    for seed in range(400):
        made = ask_until_made(seed, 0.6, 0.6, 0.6)
        found += any(rival.outlook in ("better", "worse") for rival in made.rivals)
    assert found <= 0.05 * 400


def test_a_real_difference_is_found():
    made = [ask_until_made(seed, 0.8, 0.4, 0.6) for seed in range(40)]
    assert all(each.better_than == ["identity", "hadamard"] for each in made)
    assert {each.action for each in made} == {"use"}


@pytest.mark.parametrize(
    ("prompts", "share", "advice"),
    [
        (32, 1.0, "Use it."),
        (8, 0.8, "Use it. It may lose more than 10% of the answers."),
        (64, 0.8, "Use it where 8 bits are too many: 20% of the answers are lost."),
    ],
)
def test_the_advice_says_what_is_lost_or_may_be(prompts, share, advice):
    right = round(share * 10) * "1"
    mine = (right.ljust(10, "0") * prompts * SIZE)[: prompts * SIZE]
    none = "0" * len(mine)
    assert decision({"mine": mine, "identity": none, "hadamard": none}).words[-1] == advice


def test_a_difference_of_the_margin_is_seldom_called_none():
    made = [ask_until_made(seed, 0.6 + MARGIN, 0.6, 0.6) for seed in range(100)]
    same = sum(each.action in ("identity", "hadamard") for each in made)
    assert same <= 0.05 * 100


def test_copies_are_never_better_and_the_simplest_is_to_be_used():
    (mine,) = drawn(random.Random(0), 128, 0.7)
    made = decision(dict.fromkeys(("mine", "identity", "hadamard"), mine), len(LOOKS))
    assert (made.better_than, made.action) == ([], "identity")
    assert made.words[-1].startswith("Use no rotation")
    worse = drawn(random.Random(1), 128, 0.4)[0]
    made = decision({"mine": mine, "identity": worse, "hadamard": mine}, len(LOOKS))
    assert (made.better_than, made.action) == (["identity"], "hadamard")
    made = decision({"mine": worse, "identity": worse, "hadamard": mine})
    assert (made.action, made.rivals[1].outlook) == ("hadamard", "worse")


def test_as_many_questions_as_are_said_settle_it():
    """By the mean of many small evaluations, whose own differences vary."""
    open_, settled = [], 0
    for seed in range(100):
        arms = drawn(random.Random(seed), 12, 0.7, 0.58, 0.58)
        made = decision(dict(zip(NAMES, arms, strict=True)))
        gains = [rival.difference for rival in made.rivals]
        if made.action == "ask" and all(abs(gain - 0.12) < 0.03 for gain in gains):
            assert f"ask {made.more_questions:,} new questions" in made.words[-1]
            open_.append(made.more_questions)
    number = sum(open_) // len(open_) // SIZE
    for seed in range(100):
        arms = drawn(random.Random(seed), number, 0.7, 0.58, 0.58)
        settled += decision(dict(zip(NAMES, arms, strict=True))).action == "use"
    assert number <= 100  # 73 prompts are measured, which settle 97 of 100
    assert settled >= 70


def test_what_is_kept_is_at_most_all_and_its_interval_covers_it():
    none = "0" * 16 * SIZE
    all_ = decision({"mine": "1" * 16 * SIZE, "identity": none, "hadamard": none}, right="10" * 64)
    assert all_.kept == 1.0, "answers that the exact model has wrong are no merit"
    assert all_.interval == pytest.approx([0.025 ** (1 / 16), 1.0])
    held = 0
    for seed in range(150):
        (mine,) = drawn(random.Random(seed), 24, 0.8)
        made = decision({"mine": mine, "identity": mine, "hadamard": mine})
        held += made.interval[0] <= 0.8 <= made.interval[1]
    assert held >= 0.93 * 150


@pytest.mark.hostile("values")
def test_where_nothing_can_be_kept_nothing_is_decided():
    nothing = decide("mine", {"mine": {}}, {}, 16)
    assert (nothing.action, nothing.kept, nothing.more_questions) == ("ask", None, None)
    unable = {"copy": ExactTaskRecall.model_construct(correct="00", prompts=[2])}
    unable = decide("mine", {"mine": {}}, unable, 16)
    assert unable.action == "nothing"
    assert str(unable).startswith(
        "The model itself can do none of the tasks, so nothing shows what"
    )
    assert decision({"mine": "1" * 64}).action == "ask", "no rival, no use"
    single = decision({"mine": "1" * 8, "identity": "0" * 8, "hadamard": "0" * 8})
    assert (single.action, single.more_questions) == ("ask", 64)
