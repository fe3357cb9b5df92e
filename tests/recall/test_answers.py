"""Reading answers in one pass, held against greedy decoding token by token."""

import pytest
import torch

from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.recall.answers import read_answers
from rotationzoo.recall.prompts import Prompt, Question

LENGTH, ANSWER = 48, slice(44, 47)


@pytest.fixture(scope="module")
def model():
    source = find("demo", None)
    return loading.load(source, loading.load_config(source), "cpu", torch.float32, None, True)


@torch.no_grad()
def continue_greedily(model, ids, count):
    for _ in range(count):
        token = model(input_ids=ids[None]).logits[0, -1].argmax()
        ids = torch.cat([ids, token[None]])
    return ids


def test_answers_are_those_of_greedy_decoding(model):
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for number in range(4):
        ids = torch.randint(2000, (ANSWER.start,), generator=generator)
        ids = continue_greedily(model, ids, LENGTH - ANSWER.start)
        if number % 2:
            ids[ANSWER.stop - 1] += 1  # not what the model writes
        prompts.append(Prompt(ids, (Question("copy", ANSWER, 0),)))
    answers = read_answers(model, prompts, batch=2)
    assert answers.correct.tolist() == [True, False, True, False]


def test_log_probability_is_that_of_the_whole_answer(model):
    ids = torch.randint(2000, (LENGTH,), generator=torch.Generator().manual_seed(1))
    questions = (Question("copy", slice(20, 23), 0), Question("copy", ANSWER, 0))
    answers = read_answers(model, [Prompt(ids, questions)])
    with torch.no_grad():
        logs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    for question, value in zip(questions, answers.log_probability, strict=True):
        positions = range(question.answer.start, question.answer.stop)
        expected = sum(logs[at - 1, ids[at]].item() for at in positions)
        assert value.item() == pytest.approx(expected, abs=1e-4)
