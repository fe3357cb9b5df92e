"""Every table at 80 columns, with long names: nothing is wider, and no number is cut or folded."""

import json
import re

import pytest
from support.reports import Made, make_evaluation, make_task

from rotationzoo.artifact.measured import Measured
from rotationzoo.cli.app import main
from rotationzoo.cli.list import show_list
from rotationzoo.cli.output import Output
from rotationzoo.recall.questions import TASKS
from rotationzoo.zoo.index import WHEEL_COPY, Index

WIDTH = 80
NAME = "an-organisation-of-many-words/A-Model-235B-A22B-Thinking-2507"


def plain(text: str) -> str:
    """Without the bold of a table's head."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def evaluation() -> Measured:
    """A report of `evaluate` with every task."""
    content = make_evaluation(Made(model=NAME, arm=NAME))
    score = {"answered": 123, "questions": 128, "log_probability": -12.3}
    recall = score | {"standard_error": {"answered": 0.012, "log_probability": 0.12}}
    costs = {"perplexity_increase": 0.1234}
    of_arm, of_exact = (dict.fromkeys(TASKS, make_task(recall, is_exact)) for is_exact in (0, 1))
    for arm in content["windows"][0]["arms"].values():
        arm |= costs | {"standard_error": costs}
        arm |= {"tasks": of_arm, "all_tasks": recall}
    content["exact"] |= {"perplexity": 12.3456, "tasks": of_exact, "all_tasks": recall}
    return Measured.model_validate(content)


def show_evaluate():
    from rotationzoo.cli.evaluate import show_evaluation

    show_evaluation(Output(), evaluation(), details=True)
    answers = ["96.1% ±1.2%", "-12.30 ±0.12", "96% -12.3"]
    return ["12.3456", *answers, "+12.34% ±12.34%"]


def show_published():
    content = json.loads(WHEEL_COPY.read_text())
    entries = Index.model_validate(content).entries[:2]
    recipes = [entry.model_copy(update={"model": NAME, "recipe": NAME[30:]}) for entry in entries]
    show_list(Output(), recipes)
    return ["2 published rotations"]


def show_plan():
    words = "plan demo --gpu 64xRTX3090 --context 1000000 --requests 1000"
    with pytest.raises(SystemExit):
        main(words.split())
    return ["1,000 requests", "RTX 3090"]


@pytest.mark.parametrize("show", [show_evaluate, show_published, show_plan])
def test_tables_fit_80_columns_with_long_names(terminal, show):
    screen = terminal(WIDTH)
    numbers = show()
    shown = plain(screen.getvalue())
    # A command is there to be copied, and never broken.
    lines = [line for line in shown.splitlines() if "rotationzoo " not in line]
    assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
    assert "…" not in shown
    for number in numbers:
        assert number in shown
