"""An evaluation by two processes, as torchrun starts them: the test stands in for torchrun."""

import json

import pytest
from support.jobs import job
from support.ranks import Beside, silent
from support.reports import evaluate

from rotationzoo.calibration.job import calibrate
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.compatibility import judged_text
from rotationzoo.evaluation.job import Evaluation, identify
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.model.loading import load_tokenizer
from rotationzoo.model.source import find
from rotationzoo.ranks import joined
from rotationzoo.recipe import PRESETS, Data
from rotationzoo.text.rows import read_corpus

TEXT = Data(tokens=704, length=352)
TASKS = TaskSettings(("quote",), questions=4)
WORDS = [
    "--tokens", "704", "--length", "352", "--queries", "4", "--tasks", "quote", "--questions", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def artifact(induction, tmp_path_factory):
    changes = {"data": TEXT, "sink": 16, "recent": 64}
    recipe = PRESETS["hadamard"].model_copy(update=changes)
    return calibrate(job(induction, tmp_path_factory.mktemp("made"), recipe)).folder


def test_two_processes_report_what_one_does(launcher, induction, artifact):
    """The model answers, so arms are asked too."""
    words = ["evaluate", induction, artifact, *WORDS, "--save", "--json"]
    first, second = launcher.start(*words).ended()
    assert first.returncode == 0, first.stderr
    silent(second, 0)
    report = evaluate(Evaluation(str(induction), [artifact], TEXT, queries=4, tasks=TASKS))
    assert report["arms"]["out"]["all_tasks"]["questions"] == 4
    # Texts and prompts are read by one process each, in the same batches.
    assert json.loads(first.stdout) == json.loads(json.dumps(report))
    saved = json.loads((artifact / "evaluation.json").read_text())
    assert saved["exact"] == report["exact"]


@pytest.fixture
def settings(tiny):
    small = Data(tokens=512, length=512)
    return Evaluation(str(tiny), [], small, queries=0, tasks=TaskSettings(()), device="cpu")


def test_a_process_that_is_gone_ends_an_evaluation(monkeypatch, settings, ended_process):
    beside = Beside(monkeypatch, rank=0)

    def progress(stage, done, total):
        if stage == "evaluating":
            beside.say_hello(ended_process)

    with (
        pytest.raises(RotationZooError, match="a process of this command is gone"),
        joined(lambda: "cpu"),
    ):
        evaluate(settings, progress)


def test_a_process_does_not_add_results_of_another_evaluation(monkeypatch, settings):
    """Here the test is process 0, and has other weights."""
    beside = Beside(monkeypatch, rank=1)
    source = find(settings.model)
    text = read_corpus(judged_text(settings.data), load_tokenizer(source))
    identity = identify((settings, text.fingerprint), source, [])
    beside.tell("begin", True)
    beside.tell("job", identity | {"weights": "of another model"})
    with (
        pytest.raises(RotationZooError, match="of another evaluation: weights differ"),
        joined(lambda: "cpu"),
    ):
        evaluate(settings)
