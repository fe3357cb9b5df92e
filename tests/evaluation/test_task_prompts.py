"""The prompts of an evaluation's recall tasks: where statements are, and what is left out."""

import pytest
import torch
from support.models import load_tokenizer, save_family
from support.reports import evaluate

from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings, plan_tasks
from rotationzoo.recall.questions import QUOTE, TASKS
from rotationzoo.recipe import Data
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import read_corpus

HIDING = tuple(task for task in TASKS if task != QUOTE)
CACHES = [
    CacheLayout(sink=16, recent=64),
    CacheLayout(sink=4, recent=100),
    CacheLayout(sink=8, recent=32, prefill_chunk=128),
    CacheLayout(sink=8, recent=96, prefill_chunk=80, prefill_layout="window"),
]


@pytest.fixture(scope="module")
def text():
    """The demo model's tokenizer and text that it has cut into rows."""
    tokenizer = load_tokenizer("demo")
    data = Data(source=str(HELD_OUT), tokens=4096, length=1024)
    return tokenizer, data, read_corpus(data, tokenizer)


def plan(text, caches, **settings):
    tokenizer, data, corpus = text
    return plan_tasks(TaskSettings(**settings), data, corpus, tokenizer, caches)


@pytest.mark.parametrize("caches", [*([cache] for cache in CACHES), CACHES], ids="abcde")
def test_every_statement_is_read_quantized_by_every_token_of_its_answer(text, caches):
    tokenizer = text[0]
    planned = plan(text, caches, questions=8)
    assert [series.task for series in planned.series] == list(TASKS)
    for cache in caches:
        exact = cache.exact_for(torch.arange(1024), 1024)
        for prompt in (prompt for series in planned.series for prompt in series.prompts):
            for question in prompt.questions:
                queries = slice(question.answer.start - 1, question.answer.stop - 1)
                size = statement_size(tokenizer, prompt, question)
                assert not exact[queries, question.source : question.source + size].any()


def statement_size(tokenizer, prompt, question) -> int:
    """Tokens from a statement's start to the end of the answer in it."""
    answer = tokenizer.decode(prompt.ids[question.answer]).strip()
    after = prompt.ids[question.source :]
    return next(n for n in range(1, len(after)) if answer in tokenizer.decode(after[:n]))


def test_blind_prompts_ask_the_same_without_the_statements(text):
    tokenizer = text[0]
    for series in plan(text, CACHES[:1], names=HIDING, questions=8).series:
        assert len({len(blind.ids) for blind in series.blind}) == 1
        for prompt, blind in zip(series.prompts, series.blind, strict=True):
            for question, moved in zip(prompt.questions, blind.questions, strict=True):
                answer = prompt.ids[question.answer]
                assert torch.equal(answer, blind.ids[moved.answer])
                before = tokenizer.decode(blind.ids[: moved.answer.start])
                assert tokenizer.decode(answer) not in before


def test_questions_are_shared_out_to_whole_prompts(text):
    for questions, prompts in ((8, [8]), (10, [5, 5]), (3, [3])):
        (series,) = plan(text, CACHES[:1], names=("needles",), questions=questions).series
        assert [len(prompt.questions) for prompt in series.prompts] == prompts


def test_prompts_longer_than_the_text_read_more_of_it(text):
    """8,192 tokens of prompt need more than the 4,096 that are evaluated."""
    (series,) = plan(text, CACHES[:1], names=("quote",), lengths=(8192,), questions=4).series
    (prompt,) = series.prompts
    rows = prompt.ids.unfold(0, 64, 1)
    assert len(rows.unique(dim=0)) > 0.95 * len(rows), "the text is repeated"


def test_tasks_without_room_are_left_out_with_a_note(text):
    planned = plan(text, [CacheLayout()], lengths=(512,), questions=4)
    assert [series.task for series in planned.series] == ["quote"]
    assert planned.notes == [
        "prompts of 512 tokens are too short to ask for needles, key-value, copy, assignments "
        "outside the exact windows"
    ]


def test_lengths_that_leave_nothing_to_ask_are_refused(text):
    with pytest.raises(RotationZooError, match="no passages are quoted in 200,000 tokens") as error:
        plan(text, [CacheLayout()], names=("quote",), lengths=(200_000,), questions=4)
    assert "--tasks none" in str(error.value.hint)
    with pytest.raises(RotationZooError, match="prompts of 300 tokens are too short"):
        plan(text, [CacheLayout()], names=("needles",), lengths=(300,), questions=4)


def test_prompts_longer_than_the_model_are_refused_before_the_weights(tmp_path):
    folder = save_family("qwen3", tmp_path / "qwen3", weights=False)
    tasks = TaskSettings(lengths=(1024, 4096))
    with pytest.raises(RotationZooError, match="4096 tokens are longer than the 2048 positions"):
        evaluate(Evaluation(str(folder), [], Data(tokens=512, length=512), tasks=tasks))
