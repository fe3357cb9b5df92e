"""The prompts that a search writes, and which tasks it finds a model able to do."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from rotationzoo.calibration.search import probes
from rotationzoo.calibration.search.probes import Trial, probe_length, try_tasks, write_probes
from rotationzoo.calibration.search.task import SearchTask
from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.recall.answers import Answers
from rotationzoo.recipe import Recipe, Search

# Distinct tokens, so that there is something to quote.
ROWS = [torch.arange(start, start + 1000) for start in (100, 1100)]
SHORT = torch.arange(8)


@pytest.fixture(scope="module")
def task() -> SearchTask:
    """A search of which only the text and the tokenizer matter."""
    recipe = Recipe(sink=16, recent=64, search=Search(prompts=5))
    tokenizer = loading.load_tokenizer(find("demo", None))
    return SearchTask(None, [], recipe, {}, None, [], [SHORT, *ROWS], tokenizer)


def test_choosing_and_testing_share_neither_text_nor_seeds(task):
    rare = {"choosing": 1990, "testing": 1991}  # tokens that no statement has
    task = replace(task, held_out=[torch.full((1000,), token) for token in rare.values()])
    sources = {}
    for part, other in (("choosing", "testing"), ("testing", "choosing")):
        prompts = write_probes(task, ["needles"], part)
        assert len(prompts) == 5
        assert {len(prompt.ids) for prompt in prompts} == {probe_length(task)} == {1000}
        ids = torch.cat([prompt.ids for prompt in prompts])
        assert (ids == rare[part]).sum() > 2000
        assert (ids == rare[other]).sum() == 0
        sources[part] = [question.source for prompt in prompts for question in prompt.questions]
        first = prompts[0].questions[0].answer.start
        assert all(16 <= question.source < first - 64 for question in prompts[0].questions)
    assert sources["choosing"] != sources["testing"]


def test_prompts_are_divided_among_what_the_model_can_do(task):
    assert Trial({"needles": 0.25, "quote": 0.2, "copy": 1.0}).able == ["needles", "copy"]
    prompts = write_probes(task, ["needles", "copy"], "choosing")
    tasks = [prompt.questions[0].task for prompt in prompts]
    assert tasks == ["needles"] * 2 + ["copy"] * 2


def test_a_trial_finds_what_the_model_can_do(task, monkeypatch):
    def read_answers(model, prompts, batch):
        questions = [question for prompt in prompts for question in prompt.questions]
        right = torch.tensor([question.task == "copy" for question in questions])
        return Answers(right, torch.zeros(len(questions)))

    monkeypatch.setattr(probes, "read_shared_answers", read_answers)
    trial = try_tasks(task)
    assert trial.able == ["copy"]
    assert len(trial.answered) == 5
    short = replace(task, held_out=[row[:200] for row in ROWS])
    trial = try_tasks(short)
    assert trial.able == []
    assert "too short for the task" in trial.skipped["copy"]
    without = partial(replace, task)
    no_prompts = task.recipe.model_copy(update={"search": Search(prompts=0)})
    assert try_tasks(without(tokenizer=None)) == try_tasks(without(recipe=no_prompts)) == Trial()


def test_one_row_both_chooses_and_tests(task):
    assert [row.tolist() for row in task.choosing] == [ROWS[0].tolist()]
    assert [row.tolist() for row in task.testing] == [ROWS[1].tolist()]
    alone = replace(task, held_out=[SHORT, ROWS[0]])
    assert len(alone.choosing) == len(alone.testing) == 1
    many = replace(task, held_out=ROWS * 4)
    assert (len(many.choosing), len(many.testing)) == (6, 2)
