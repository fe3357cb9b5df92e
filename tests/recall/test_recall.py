"""Recall tasks: their prompts, and answers that are read in one pass as by greedy decoding."""

import re

import pytest
import torch

from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.recall.prompts import Prompt, PromptSettings, Question, read_answers, write_prompts
from rotationzoo.recall.questions import POOLS, TASKS
from rotationzoo.recipe import Data
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import read_corpus

LENGTH = 1024


@pytest.fixture(scope="module")
def filler(tokenizer):
    text = read_corpus(Data(source=str(HELD_OUT), tokens=8192, length=4096), tokenizer)
    return torch.cat(text.rows).tolist()


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_writes_the_same_prompts(task, tokenizer, filler):
    first, second, other = (
        write_prompts(PromptSettings(task, 2, LENGTH, recent=64, seed=seed), tokenizer, filler)
        for seed in (0, 0, 1)
    )
    assert all(map(torch.equal, (p.ids for p in first), (p.ids for p in second)))
    assert not torch.equal(first[0].ids, other[0].ids)
    assert not torch.equal(first[0].ids, first[1].ids)


def test_chains_of_assignments_are_hidden_in_order(tokenizer, filler):
    settings = PromptSettings("assignments", prompts=1, length=LENGTH, recent=64)
    (prompt,) = write_prompts(settings, tokenizer, filler)
    text = tokenizer.decode(prompt.ids)
    for question in prompt.questions:
        asked = tokenizer.decode(prompt.ids[: question.answer.start])
        name = asked.rsplit("assert ", 1)[1].removesuffix(" ==")
        before = re.search(rf"{name} = (\w+_\w+)", text)
        assert text.index(f"{before[1]} = ") < before.start()


def test_quoted_passages_are_copies(tokenizer, filler):
    settings = PromptSettings("quote", prompts=2, length=LENGTH, recent=64)
    for prompt in write_prompts(settings, tokenizer, filler):
        ids = prompt.ids.tolist()
        for question in prompt.questions:
            size = question.answer.stop - question.answer.start
            start = question.source + 12  # the cue comes first
            assert ids[start : start + size] == ids[question.answer]


def test_choosing_and_judging_share_no_word():
    assert not set(POOLS["choose"]) & set(POOLS["judge"])


SHORT, ANSWER = 48, slice(44, 47)


@pytest.fixture(scope="module")
def model():
    source = find("demo", None)
    return loading.load(source, loading.load_config(source), "cpu", torch.float32, None, True)


def test_answers_are_those_of_greedy_decoding(model):
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for number in range(4):
        ids = torch.randint(2000, (ANSWER.start,), generator=generator)
        count = SHORT - ANSWER.start
        (ids,) = model.generate(ids[None], max_new_tokens=count, do_sample=False)
        if number % 2:
            ids[ANSWER.stop - 1] += 1  # not what the model writes
        prompts.append(Prompt(ids, (Question("copy", ANSWER, 0),)))
    answers = read_answers(model, prompts)
    assert answers.correct.tolist() == [True, False, True, False]


def test_log_probability_is_that_of_the_whole_answer(model):
    ids = torch.randint(2000, (SHORT,), generator=torch.Generator().manual_seed(1))
    questions = (Question("copy", slice(20, 23), 0), Question("copy", ANSWER, 0))
    answers = read_answers(model, [Prompt(ids, questions)])
    with torch.no_grad():
        logs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    for question, value in zip(questions, answers.log_probability, strict=True):
        positions = range(question.answer.start, question.answer.stop)
        expected = sum(logs[at - 1, ids[at]].item() for at in positions)
        assert value.item() == pytest.approx(expected, abs=1e-4)
