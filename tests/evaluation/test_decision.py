"""The decision on an artifact: when it may be served, how often it is wrong, and in what words."""

import random

import pytest
from support.reports import SIZE, auto, decide_on, draw_answers, recall

from rotationzoo.artifact.scores import ALL_ELSE, Decision, ExactLengthScore, ExactTaskRecall
from rotationzoo.evaluation.decision import (
    FEWEST_ANSWERS,
    LEVEL,
    SIMPLEST,
    Rule,
    decide,
    put_into_words,
    spend_level,
)
from rotationzoo.evaluation.tasks.prompts import LOOKS, MOST_QUESTIONS


def ask_until_made(seed: int, share: float) -> Decision:
    """A decision as `--questions auto` makes it of four tasks at once."""
    (mine,) = draw_answers(random.Random(seed), 4 * LOOKS[-1] // SIZE, share)
    for questions in LOOKS:
        made = decide_on({"mine": mine[: 4 * questions]}, auto(questions))
        if made.action != "ask":
            break
    return made


def counted(seen: list[Decision], action: str) -> int:
    return sum(each.action == action for each in seen)


@pytest.mark.parametrize(
    ("kept", "answers", "floor", "action", "lead"),
    [
        (320, 320, 0.9, "serve", "Serve it: mine keeps 100% of 320 answers"),
        (480, 512, 0.9, "serve", "Serve it: mine keeps 94% of 512 answers"),
        (480, 512, 0.95, "ask", "Undecided: mine keeps 94% of 512 answers"),
        (19, 48, 0.9, "refuse", "Do not serve it: mine keeps 40% of 48 answers"),
        (12, 16, 0.9, "ask", "Undecided: mine keeps 75% of 16 answers"),
        (72, 80, 0.9, "ask", "Undecided: mine keeps 90% of 80 answers"),
        (96, 96, 0.3, "ask", "Undecided: mine keeps 100% of 96 answers"),
    ],
)
def test_the_interval_and_the_floor_decide(kept, answers, floor, action, lead):
    lost = answers - kept
    digits = ["1"] * answers
    for place in range(lost):  # spread over all prompts
        digits[place * answers // lost] = "0"
    made = decide_on({"mine": "".join(digits)}, Rule(floor))
    assert (made.action, made.floor) == (action, floor)
    assert made.words[0].startswith(lead)
    assert f"at least {100 * floor:g}% were to be kept" in made.words[0]
    assert (made.more_questions is not None) == (action == "ask")
    if made.more_questions:
        assert f"{made.more_questions:,} new questions of each task" in made.words[0]
        assert FEWEST_ANSWERS <= made.more_questions <= MOST_QUESTIONS


@pytest.mark.parametrize(
    ("digits", "low"),
    [
        ("1" * 31 + "0", 0.74),
        ("1" * 32, 0.77),
        ("11111110" * 4, 0.66),
        ("1" * 28 + "0" * 4, 0.56),  # as many are lost, but all in one prompt
    ],
)
def test_answers_count_less_where_losses_share_a_prompt(digits, low):
    assert decide_on({"mine": digits}, Rule()).interval[0] == pytest.approx(low, abs=0.01)


def test_looks_spend_the_level_once_and_late_ones_more():
    levels = [spend_level(questions, LOOKS) for questions in LOOKS]
    assert sum(levels) == pytest.approx(LEVEL)
    assert levels == sorted(levels)
    assert spend_level(40, (40,)) == LEVEL, "one number of questions is one look"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("share", "wrong"),
    [
        (0.89, "serve"),  # 0 of 400 are measured; 66 are refused
        (0.8, "serve"),  # 0; 400 are refused
        (0.91, "refuse"),  # 0; 61 are served
        (0.97, "refuse"),  # 0; 400 are served
    ],
)
def test_looks_together_keep_the_level(share, wrong):
    """Where 90 % are to be kept, and looks are taken until a decision is made."""
    made = [ask_until_made(seed, share) for seed in range(400)]
    assert counted(made, wrong) <= 0.05 * 400


@pytest.mark.parametrize(("share", "action"), [(0.96, "serve"), (0.8, "refuse")])
def test_as_many_questions_as_are_said_settle_it(share, action):
    """By the mean of small evaluations: 33 prompts for 96 % settle 85 of 100, 20 for 80 % 76."""
    wanted = []
    for seed in range(200):
        made = decide_on({"mine": draw_answers(random.Random(seed), 8, share)[0]})
        if made.action == "ask" and abs(made.kept - share) < 0.02:
            wanted.append(made.more_questions)
    prompts = sum(wanted) // len(wanted) // SIZE
    new = [draw_answers(random.Random(seed), prompts, share)[0] for seed in range(1000, 1100)]
    settled = counted([decide_on({"mine": each}, Rule()) for each in new], action)
    assert len(wanted) >= 20
    assert settled >= 70


def test_what_is_kept_is_at_most_all_and_lies_between_its_bounds():
    all_ = decide_on({"mine": "1" * 16 * SIZE}, Rule(), right="10" * 64)
    assert all_.kept == 1.0, "answers that the exact model has wrong are no merit"
    low, high = all_.interval
    assert high == 1.0
    assert 0.05 ** (1 / 16) < low < 0.05 ** (1 / 64), "worth less than 64 answers, in 16 prompts"
    missed = [0, 0]
    for seed in range(150):
        made = decide_on({"mine": draw_answers(random.Random(seed), 24, 0.8)[0]}, Rule())
        missed[0] += made.interval[0] > 0.8
        missed[1] += made.interval[1] < 0.8
    assert max(missed) <= 0.07 * 150, "each bound has its own 5 %"


def test_the_words_name_the_other_arms_the_best_first_at_their_bits():
    mine, none, some = draw_answers(random.Random(0), 32, 0.97, 0.3, 0.8)
    arms = {"mine+transform": mine, "identity": none, "hadamard": some}
    arms |= {"mine": some, "kivi": "1" * 8 + "0" * 8}
    bits = dict.fromkeys(arms, 3.0) | {"kivi": 2.5}
    *_, line = decide_on(arms, bits=bits).words
    assert line.startswith("In their own bytes (mine: 3.0 bits): ")
    assert f"{SIMPLEST['hadamard']} keeps 8" in line
    assert "kivi 50% (2.5), no rotation " in line, "of the questions that it was asked"
    assert "the same rounded one by one" in line
    both = f"no rotation and {SIMPLEST['hadamard']}."
    assert line.endswith(f"; mine is clearly better than {both}")
    alike = decide_on(dict.fromkeys(("mine", "identity", "hadamard"), "1" * 1024)).words[-1]
    assert alike.endswith(f"mine is within 3 points of {both}")


def test_calibration_is_compared_with_a_matrix_with_all_else_the_same():
    """By the first questions, if it was asked no more; nearest codes have the plain matrix."""
    mine, some, none = draw_answers(random.Random(0), 32, 0.97, 0.8, 0.3)
    arms = {"mine": mine, "identity": none, "hadamard": some, ALL_ELSE: mine[:128]}
    made = decide_on({"mine+transform": mine, **arms})
    assert [rival.name for rival in made.rivals] == ["identity", ALL_ELSE]
    assert made.rivals[1].difference == 0
    assert made.rivals[1].outlook == "open", "128 of 256 questions leave more than 3 points"
    whole = decide_on({"mine+transform": mine, **arms, ALL_ELSE: none}).rivals[1]
    first = decide_on({"mine+transform": mine, **arms, ALL_ELSE: none[:128]}).rivals[1]
    short = {"mine+transform": mine[:128], "identity": none[:128], ALL_ELSE: none[:128]}
    alone = decide_on(short).rivals[1]
    assert first.interval == alone.interval != whole.interval
    assert first.difference == alone.difference
    assert [rival.name for rival in decide_on(arms).rivals] == ["identity", "hadamard"]


def test_the_words_name_tasks_the_worst_first_and_those_that_show_little():
    exact, arms = {}, {}
    for task, right, kept in (("needles", 32, 32), ("copy", 6, 6), ("quote", 16, 8)):
        lengths = [ExactLengthScore.model_construct(length=0, questions=32, can_do=True)]
        shared = {"by_length": lengths}
        correct = ("1" * right).ljust(32, "0")
        exact[task] = ExactTaskRecall.model_construct(correct=correct, prompts=[8] * 4, **shared)
        arms[task] = recall(("1" * kept).ljust(32, "0")).model_copy(update=shared)
    made = decide("mine", {"mine": arms}, exact, 32, Rule())
    line = put_into_words(made, {"mine": arms}, exact).words[1]
    assert line == (
        "By task: quote 50% of 16, copy 100% of 6, needles 100% of 32. The model itself answers "
        "6 of 32 copy questions: they show little."
    )


@pytest.mark.hostile("values")
def test_where_nothing_can_be_kept_nothing_is_decided():
    unasked = decide("mine", {"mine": {}}, {}, 16, Rule())
    assert (unasked.action, unasked.kept, unasked.more_questions) == ("ask", None, None)
    exact = {"copy": ExactTaskRecall.model_construct(correct="00", prompts=[2])}
    unable = decide("mine", {"mine": {}}, exact, 16, Rule())
    assert unable.action == "nothing"
    assert str(put_into_words(unable, {"mine": {}}, exact)).startswith(
        "Undecided: the model itself can do none of the tasks, so"
    )
    single = decide_on({"mine": "1" * 8})
    assert (single.action, single.interval[1]) == ("ask", 1.0)
