"""What real models are asked, and what a script measures of them: that DEV and TEST share nothing,
and that what is exact in a plan of bits stays exact."""

import json
import re
from dataclasses import replace

import pytest
import real_models_lose
import torch
from real_models_lose import PlannedCodec, feed_back, frames_of
from real_questions import DEV, LENGTHS, SPLITS, TASKS, TEST
from rotationzoo.linalg.error_feedback import factorize
from support.jobs import RECIPE, job
from support.models import load_saved

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.codec import feedback, int2
from rotationzoo.codec.bit_allocation import COARSE
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


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_few_operations_choose_the_codes_of_the_definition(bits):
    generator = torch.Generator().manual_seed(bits)
    rows = torch.randn(2, 200, 64, generator=generator)
    mixed = torch.randn(2, 64, 64, generator=generator) @ torch.diag(1 / torch.arange(1, 65.0))
    factor, format = factorize(mixed @ mixed.mT), replace(COARSE, bits=bits)
    expected = int2.dequantize(feedback.quantize(rows[None], factor, None, format), format)[0]
    read = feed_back(rows, factor, format)
    # A sum in another order may round one channel to another code, and with it later ones.
    same = (read - expected).abs().amax(-1) < 1e-5
    assert same.double().mean() > 0.98
    assert feed_back(0 * rows, factor, format).abs().max() < 1e-6


@pytest.fixture(scope="module")
def whitened(tiny, tmp_path_factory):
    """The tiny model's artifact with all that a default calibration stores."""
    changes = {"feedback": True, "whiten": True, "center_keys": True}
    recipe = RECIPE.model_copy(update=changes)
    return calibrate(job(tiny, tmp_path_factory.mktemp("whitened"), recipe))


@pytest.fixture(scope="module")
def model(tiny):
    return load_saved(tiny)


def test_rows_of_exact_layers_and_sides_come_back_as_they_are(whitened):
    codec = PlannedCodec(frames_of(whitened.rotations, torch.device("cpu")), {(0, "key"): 2})
    rows = torch.randn(2, 2, 100, 16)
    for place in ((0, "value"), (1, "key"), (1, "value")):
        assert torch.equal(codec.fake_quantize(rows, *place, COARSE), rows)
    assert not torch.isclose(codec.fake_quantize(rows, 0, "key", COARSE), rows).all()
    assert codec.layers(whitened.geometry) == {0}
    assert codec.stored_bits(0, "key", 16, COARSE) == 3
    assert codec.stored_bits(1, "key", 16, COARSE) == 16


def test_the_script_runs_and_goes_on_where_it_was_cut_short(
    tmp_path, tiny, whitened, monkeypatch, capsys
):
    settings = "--questions 2 --lengths 400 --rows 1 --sink 8 --recent 32"
    words = [tiny, whitened.folder, *settings.split(), "--json", tmp_path / "kept.json"]
    for seconds in (0, 100):
        command = ["real_models_lose", *words, "--seconds", seconds]
        monkeypatch.setattr("sys.argv", [str(word) for word in command])
        assert real_models_lose.main() == 0
        arms = json.loads((tmp_path / "kept.json").read_text())["arms"]
        assert bool(arms) == (seconds > 0)
    shown = capsys.readouterr().out
    assert "| keys and values, 3 bits | 4.000 |" in shown
    assert "q4_0 stores 32 channels together" in shown
    assert {"keys, 2 bits", "kivi", "kvarn-k2v2", "out as it is: out+feedback"} <= set(arms)
    assert all(arm["kl"] > 0 for arm in arms.values())
