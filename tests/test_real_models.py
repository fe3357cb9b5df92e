"""What real models are asked, and what a script measures of them: DEV and TEST share nothing."""

import json
import re

import pytest
import real_models_lose
from real_questions import DEV, LENGTHS, SPLITS, TASKS, TEST
from support.jobs import SMALL, job
from support.recipes import CODED

from rotationzoo.calibration.calibrate import calibrate
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


@pytest.fixture(scope="module")
def coded(tiny, tmp_path_factory):
    """The tiny model's artifact with transform coding."""
    return calibrate(
        job(tiny, tmp_path_factory.mktemp("coded"), CODED.model_copy(update={"data": SMALL}))
    )


def test_the_script_runs(tmp_path, tiny, coded, monkeypatch, capsys):
    settings = "--questions 2 --lengths 400 --rows 1 --sink 8 --recent 32"
    words = [tiny, coded.folder, *settings.split(), "--json", tmp_path / "kept.json"]
    monkeypatch.setattr("sys.argv", [str(word) for word in ["real_models_lose", *words]])
    real_models_lose.main()
    arms = json.loads((tmp_path / "kept.json").read_text())["arms"]
    assert "q4_0 stores 32 channels together" in capsys.readouterr().out
    assert {"kivi", "turboquant_3bit_nc", "out as it is: out+transform"} <= set(arms)
    assert all(arm["kl"] > 0 for arm in arms.values())
