"""What an evaluation does in the time there is, and what it says of that before it begins."""

from dataclasses import replace

import pytest
import torch

from rotationzoo.api import evaluation_job
from rotationzoo.artifact.measured import Measured
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.evaluate import evaluate
from rotationzoo.evaluation.prepare import Evaluation, prepare
from rotationzoo.evaluation.tasks import prompts
from rotationzoo.evaluation.tasks.answering import ExactAnswers, choose_cheap
from rotationzoo.evaluation.tasks.prompts import STEP, Series, TaskPlan, TaskSettings
from rotationzoo.progress import silent
from rotationzoo.recall.prompts import Answers, Prompt
from rotationzoo.recipe import Data
from rotationzoo.settings import EvaluationSettings


@pytest.fixture(scope="module")
def job(induction, mine):
    tasks = TaskSettings(("needles", "quote"), questions=2 * STEP)
    options = dict(baselines=("identity", "hadamard"), device="cpu")
    return Evaluation(str(induction), [mine], Data(tokens=1024, length=512), tasks, **options)


def timed(job: Evaluation, minutes: float) -> tuple[Measured, list[tuple[str, str]]]:
    """The report on a job in this time, and what was told, with the stage before it."""
    stages, told = [""], []
    settings = replace(job, tasks=replace(job.tasks, minutes=minutes))
    tell = lambda words: told.append((stages[-1], words))  # noqa: E731
    return evaluate(settings, lambda stage, *_: stages.append(stage), tell), told


@pytest.mark.thorough
def test_with_enough_time_everything_is_asked_in_one_look(job):
    report, (_, (stage, words)) = timed(job, minutes=600)
    assert stage == "finding the pace", "before anything is measured"
    assert words.startswith("16 questions of each task, as much text as fits take about 10.0 hours")
    counts = {name: arm.tasks["needles"].questions for name, arm in report.window.arms.items()}
    assert counts == dict.fromkeys(counts, STEP) | {"mine+transform": 16}


def test_what_does_not_fit_is_left_out_and_said(job):
    report, told = timed(job, minutes=1e-4)
    assert "the questions whose answers cost least" in told[1][1]
    assert list(report.window.arms) == ["mine", "mine+transform"]
    assert any("left out for lack of time: identity, " in note for note in report.notes)
    assert (report.tasks.questions, report.text.rows) == (STEP, 1)


@pytest.mark.thorough
def test_short_time_goes_to_the_short_prompts(job, monkeypatch):
    monkeypatch.setattr(prompts, "SHORT", 256)
    job = replace(job, data=Data(tokens=1024, length=1024))
    report, _ = timed(job, minutes=1e-4)
    assert report.tasks.lengths == [256]
    assert any("left out for lack of time: prompts of 1,024 tokens, " in n for n in report.notes)
    assert report.window.verdict.decisions[0].kept is not None
    chosen = replace(job, tasks=replace(job.tasks, lengths=(256, 512)))
    assert timed(chosen, minutes=1e-4)[0].tasks.lengths == [256, 512], "the user chose them"


def test_the_exact_model_alone_chooses_the_cheap_prompts():
    ids, settings = torch.zeros(64, dtype=torch.long), TaskSettings(("needles",))
    series, exact = [], []
    for length, right in ((64, 4), (128, 8), (256, 7)):
        prompt = Prompt(ids.repeat(length // 64), ())
        series.append(Series("needles", length, [prompt], []))
        correct = torch.arange(8) < right
        blind = Answers(torch.zeros(8, dtype=torch.bool), torch.zeros(8))
        exact.append(ExactAnswers(series[-1], Answers(correct, torch.zeros(8)), blind))
    plan, chosen = choose_cheap(TaskPlan(settings, (64, 128, 256), series), exact)
    assert chosen == exact[:2]
    assert plan.series == series[:2]
    assert plan.notes[0].endswith("a right answer takes more time there: needles in 256 tokens")


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"questions": 8, "lengths": 1024}, 4096),
        ({"questions": 1}, 5120),
        ({"questions": 256}, 16384),
        ({"questions": 8, "lengths": 1024, "tokens": 8192}, 8192),
        ({"questions": 8, "tasks": ()}, 16384),
        ({}, 16384),
    ],
)
def test_few_questions_come_with_little_text(options, tokens):
    assert evaluation_job(EvaluationSettings("demo", **options)).data.tokens == tokens


def test_rungs_are_not_asked_by_the_clock(job):
    timed = replace(job, tasks=replace(job.tasks, minutes=1.0), rungs=(None,))
    with pytest.raises(UsageError, match="cannot be combined with --minutes"):
        prepare(timed, silent, print)
