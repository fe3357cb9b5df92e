"""The options of `evaluate --harness`, and what is said where the extra is not installed."""

import sys
from pathlib import Path

import pytest
from support.command_line import only_error

from rotationzoo.cli.evaluate import parse_harness
from rotationzoo.errors import UsageError


def test_names_are_read_once_each():
    settings = parse_harness(" gsm8k, niah_single_1,,gsm8k", 5, Path("tasks"), True)
    assert settings.tasks == ("gsm8k", "niah_single_1")
    assert (settings.limit, settings.folder, settings.chat) == (5, Path("tasks"), True)
    assert parse_harness(None, None, None, False) is None


@pytest.mark.parametrize(
    "options", [(" , ", None, None, False), (None, 5, None, False), (None, None, None, True)]
)
def test_options_that_ask_nothing(options):
    with pytest.raises(UsageError, match="--harness"):
        parse_harness(*options)


def test_without_the_extra_it_is_named(inside, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)  # importing it fails
    error = only_error(inside("evaluate", "no-such-model", "--harness", "gsm8k"))
    assert "--harness needs lm-evaluation-harness, which is not installed" in error
    assert "Hint: pip install 'lm-eval[ruler]>=" in error
