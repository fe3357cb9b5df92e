"""Recall tasks inside an evaluation: who is asked, and what is reported of the answers."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.reports import evaluate, make_evaluation

from rotationzoo.artifact.measured import Measured
from rotationzoo.artifact.scores import Decision
from rotationzoo.cli.evaluate import check_kept, suggest_next
from rotationzoo.cli.next_steps import remember_words
from rotationzoo.cli.output import Output
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.evaluate import _saved_answers
from rotationzoo.evaluation.prepare import Evaluation, prepare
from rotationzoo.evaluation.tasks import answering
from rotationzoo.evaluation.tasks.answering import ExactAnswers
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.progress import silent
from rotationzoo.recall.prompts import Answers, read_answers
from rotationzoo.recall.questions import TASKS
from rotationzoo.recipe import Data
from rotationzoo.settings import EvaluationSettings, parse_lengths, parse_tasks, parse_windows
from rotationzoo.words import duration

LENGTH, SHORT = 512, 352
TEXT = Data(tokens=LENGTH, length=LENGTH)


@pytest.fixture(scope="module")
def job(induction, mine):
    tasks = TaskSettings(("needles", "key-value", "quote"), questions=8)
    options = dict(baselines=("identity",), device="cpu")
    return Evaluation(str(induction), [mine], TEXT, tasks, **options)


@pytest.fixture(scope="module")
def report(job):
    tasks = replace(job.tasks, lengths=(LENGTH, SHORT))
    return evaluate(replace(job, tasks=tasks, save_to=job.artifacts))


def test_arms_are_asked_what_the_exact_model_can_do(report):
    exact = report["exact"]["tasks"]
    able = {task: score["can_do"] for task, score in exact.items()}
    assert able == {"needles": True, "key-value": False, "quote": True}
    (note,) = (note for note in report["notes"] if "cannot do key-value in 512 tokens" in note)
    assert f"{exact['key-value']['answered']} of 8 right" in note
    assert any("352 tokens are too short to ask for needles" in note for note in report["notes"])
    questions = {"needles": [(LENGTH, 8)], "quote": [(LENGTH, 8), (SHORT, 8)]}
    for arm in report["arms"].values():
        assert list(arm["tasks"]) == list(questions)
        for task, score in arm["tasks"].items():
            lengths = [(each["length"], each["questions"]) for each in score["by_length"]]
            assert lengths == questions[task]
            assert score["questions"] == exact[task]["questions"] == sum(exact[task]["prompts"])
            assert score["correct"].count("1") == score["answered"]
            assert sum(part["answered"] for part in score["by_length"]) == score["answered"]
        assert arm["all_tasks"]["questions"] == 24
    # Measured: exact -1 nats an answer, the artifact -5, without a rotation -40.
    logs = {name: arm["all_tasks"]["log_probability"] for name, arm in report["arms"].items()}
    assert logs["identity"] < logs["mine"] < report["exact"]["all_tasks"]["log_probability"]


@pytest.mark.thorough
def test_a_stopped_evaluation_asks_nothing_twice(job, monkeypatch):
    saved = job.artifacts[0].with_name("mine.answers.safetensors")
    tasks = replace(job.tasks, names=("needles", "quote"), questions=4)
    job = replace(job, tasks=tasks, baselines=("hadamard",), save_to=job.artifacts)
    asked = []

    def read(*arguments):
        asked.append(arguments)
        return read_answers(*arguments)

    monkeypatch.setattr(answering, "read_answers", read)

    def stop(stage, done, total):
        if stage == "answering with mine" and done == total > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(job, stop)
    before = len(asked)
    assert saved.exists()
    stopped = evaluate(job)
    assert not saved.exists()
    both = len(asked)
    saved.write_bytes(b"damaged")
    whole = evaluate(job)
    twice = -(-4 // TASKS["quote"])  # the prompts of the last series, before which it was saved
    assert before < len(asked) - both == both - twice
    for name, arm in whole["arms"].items():
        assert stopped["arms"][name]["tasks"] == arm["tasks"]


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_answers_of_another_version_are_asked_again(job, library, monkeypatch):
    ready = prepare(replace(job, save_to=job.artifacts), silent, lambda words: None)
    saved = _saved_answers(ready)
    saved.save("exact", [], Answers(torch.ones(1, dtype=torch.bool), torch.zeros(1)))
    assert _saved_answers(ready).find("exact", []) is not None
    monkeypatch.setattr(f"{library}.__version__", "0.1")
    assert _saved_answers(ready).find("exact", []) is None
    saved.remove()


def test_the_next_command(capsys):
    def following(model: str, artifacts: list[Path], action="serve", **about) -> str:
        chosen = {name: about.pop(name, None) for name in ("engine", "revision")}
        decided = [Decision(arm="mine", action=action, level=0.05, words=[], **about)]
        suggest_next(Output(), decided, EvaluationSettings(model, artifacts, seed=3, **chosen))
        last = capsys.readouterr().err.splitlines()[-1]
        return last.removeprefix("Next: rotationzoo ")

    artifacts = [Path("rotations/my demo")]
    demo = following("demo", artifacts)
    assert demo == "generate demo --rotations 'rotations/my demo' --compare"
    other = following("a/b", artifacts, revision="c")
    assert other.startswith("generate a/b --revision c --rotations")
    assert other.endswith("--prompt TEXT")
    assert following("a/b", []) == "calibrate a/b"
    assert following("a/b", artifacts, "refuse", bits=2.53) == "calibrate a/b --bits 3"
    about = {"engine": "sglang", "floor": 0.95, "bits": 4.0}
    command = following("a/b", artifacts, "refuse", **about)
    assert command == "evaluate a/b 'rotations/my demo' --for sglang --keep 95 --rivals fp8"
    remember_words(["evaluate", "a/b", "x", "--questions", "8", "--seed=3", "--save"])
    more = "evaluate a/b x --save --questions 96 --seed 4"
    assert following("a/b", artifacts, "ask", more_questions=96) == more


def test_the_values_of_options():
    assert parse_tasks("all") is None
    assert parse_tasks("copy,needles,copy") == ["copy", "needles"]
    assert parse_tasks("none") == []
    assert parse_lengths("2048,8192") == [2048, 8192]
    assert parse_windows("4/16,8/32,4/16") == [(4, 16), (8, 32)]
    for text in ("64", "a/b"):
        with pytest.raises(UsageError, match="--windows"):
            parse_windows(text)
    for lengths in ("2k", "", "512,", "-1"):
        with pytest.raises(UsageError, match="--lengths"):
            parse_lengths(lengths)
    for setting, value in (("lengths", (1,)), ("questions", 0)):
        with pytest.raises(UsageError, match=f"--{setting}"):
            TaskSettings(**{setting: value}).check()


def test_what_questions_will_take_is_rounded_up():
    assert [duration(time) for time in (5, 100, 5400)] == ["5 seconds", "2 minutes", "1.5 hours"]


@pytest.mark.parametrize("action", ["serve", "ask", "refuse", "nothing"])
def test_what_is_not_to_be_served_fails_where_a_share_is_to_be_kept(action):
    content = make_evaluation()
    content["windows"][0]["verdict"]["decisions"][0] |= {"action": action, "floor": 0.95}
    refusal = pytest.raises(RotationZooError, match=r"at least 95% of .* made")
    with nullcontext() if action == "serve" else refusal:
        check_kept(Measured.model_validate(content))


# ---- what a model can do


@pytest.mark.parametrize(
    ("asked", "blind", "can_do"),
    [
        ((2, -5.0), (0, -20.0), True),  # answers a fifth
        ((1, -10.0), (0, -20.0), True),  # lacks half of the nats
        ((1, -10.1), (0, -20.0), False),
        ((6, -2.0), (5, -3.0), False),  # guesses what it answers
        ((10, -0.1), (9, -0.3), True),
    ],
)
def test_what_the_model_can_do(asked, blind, can_do):
    def answers(count, value):
        return Answers(torch.arange(10) < count, torch.full((10,), value, dtype=torch.float64))

    assert ExactAnswers(None, answers(*asked), answers(*blind)).can_do == can_do
