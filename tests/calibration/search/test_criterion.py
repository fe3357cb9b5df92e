"""Which of two scores is better, and which candidates win ties."""

from types import SimpleNamespace

import torch

from rotationzoo.calibration.search.candidate import Candidate
from rotationzoo.calibration.search.contest import pick_finalists, pick_winner
from rotationzoo.calibration.search.criterion import Score, find_best, is_better
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import LayerRotations, Rotation, Rotations

NOISE = torch.tensor([0.1, -0.1, 0.05, -0.05], dtype=torch.float64)


def score(divergence: float, loss: float | None = None, noise: float = 0.0) -> Score:
    """Four texts and, if the model can answer, four prompts; prompts differ by `noise`."""
    empty = torch.empty(0, dtype=torch.float64)
    answers = empty if loss is None else loss + noise * NOISE
    return Score(answers, answers, torch.full((4,), divergence, dtype=torch.float64))


def test_answers_come_before_predictions():
    better, worse = score(2.0, 0.1), score(1.0, 0.2)
    assert is_better(better, worse)
    assert not is_better(worse, better)
    assert find_best([worse, better]) == 1


def test_predictions_order_those_that_lose_the_same():
    scores = [score(2.0, 0.1), score(1.0, 0.101, noise=1.0), score(0.5, 0.2)]
    assert find_best(scores) == 1
    assert is_better(scores[1], scores[0])
    assert not is_better(scores[0], scores[0])
    unclear = score(1.0, 0.12, noise=1.0)
    assert find_best([scores[0], unclear]) == 0, "the lower loss, though the difference is noise"
    assert not is_better(unclear, scores[0])
    assert not is_better(scores[0], unclear), "which is not enough to give up a simpler one"


def test_predictions_are_all_there_is_without_answers():
    assert find_best([score(2.0), score(1.0)]) == 1
    assert is_better(score(1.0), score(2.0))
    assert not is_better(score(2.0), score(1.0))


def candidate(name: str, equalize: bool = False, heads: str = "own") -> Candidate:
    rotation = Rotation(torch.eye(4)[None], torch.tensor([0.9], dtype=torch.float64))
    recipe = Recipe(equalize=equalize)
    return Candidate(name, recipe, Rotations({0: LayerRotations(rotation, rotation)}), heads)


def judge(scores: dict[str, Score]) -> SimpleNamespace:
    """A criterion that knows the scores of candidates by the first word of their names."""
    return SimpleNamespace(
        measure=lambda candidates, *_: {name: scores[name.split(",")[0]] for name in candidates}
    )


def test_simple_candidates_win_ties():
    plain, folded = candidate("plain"), candidate("folded", equalize=True)
    chosen = candidate("chosen", heads="both")
    every = [chosen, folded, plain]
    noisy = score(1.0, 0.2, noise=1.0)
    assert pick_winner(judge(dict.fromkeys(("plain", "folded", "chosen"), noisy)), every) is plain
    slightly = {"plain": score(1.0, 0.21), "folded": noisy, "chosen": noisy}
    assert pick_winner(judge(slightly), every) is plain
    clearly = {"plain": score(1.0, 0.5), "folded": score(1.0, 0.2), "chosen": noisy}
    assert pick_winner(judge(clearly), every) is folded
    most = {**clearly, "chosen": score(1.0, 0.1)}
    assert pick_winner(judge(most), every) is chosen


def test_one_finalist_needs_no_folded_weights():
    names = ("first", "second", "third")
    simple = [candidate(name, equalize=name != "third") for name in names]
    by_head = [candidate("keys", heads="keys"), candidate("both", heads="both")]
    losses = {"first": 0.1, "second": 0.2, "third": 0.3, "keys": 0.5, "both": 0.4}
    criterion = judge({name: score(1.0, loss) for name, loss in losses.items()})
    finalists = pick_finalists(criterion, simple, by_head)
    assert [one.variant for one in finalists] == ["first", "second", "third", "both"]
    assert pick_finalists(criterion, simple[1:], [])[-1].variant == "third"
