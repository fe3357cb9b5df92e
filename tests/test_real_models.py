"""What real models are asked: DEV and TEST share nothing."""

import json
import re

import pytest
from real_questions import DEV, LENGTHS, SPLITS, TASKS, TEST

from rotationzoo.codec.windows import CacheLayout
from rotationzoo.recall.questions import QUOTE
from rotationzoo.text.documents import BUNDLED

KEY = re.compile(r"[a-z]+_[a-z]+(?= is \d{6}|\": \d{6}|\"\] == \d{6})")


def asked(split, tokenizer, task) -> set[str]:
    """The keys that a half asks for, or the passages that it quotes, at all lengths."""
    found = set()
    for length in LENGTHS:
        for prompt in split.prompts(tokenizer, task, length, range(32), CacheLayout()):
            assert len(prompt.ids) == length
            if task == QUOTE:
                found |= {tokenizer.decode(prompt.ids[each.answer]) for each in prompt.questions}
            else:
                begin, end = (prompt.questions[at].answer for at in (0, -1))
                text = tokenizer.decode(prompt.ids[begin.start - 32 : end.stop])
                keys = KEY.findall(text)
                assert len(keys) == len(prompt.questions)
                found |= set(keys)
    return found


def test_halves_share_no_text():
    halves = [set(split.documents) for split in SPLITS.values()]
    calibrated = {json.loads(line)["text"] for line in BUNDLED.read_text().splitlines()}
    assert [len(half) for half in halves] == [12, 12]
    assert not halves[0] & halves[1]
    assert not calibrated & (halves[0] | halves[1])


@pytest.mark.parametrize("task", TASKS)
def test_halves_share_no_question(task, tokenizer):
    dev, test = (asked(split, tokenizer, task) for split in (DEV, TEST))
    assert len(dev) > 50
    assert len(test) > 50
    assert not dev & test
