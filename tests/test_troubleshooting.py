"""docs/troubleshooting.md quotes errors as they are printed: where it shows a command, that command
is run; every other sentence is one that the code can say."""

import ast
import re
import shlex
from functools import cache

import pytest
from support.places import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
TEXT = PAGE.read_text("utf-8")
SHOWN = re.findall(r"```console\n\$ rotationzoo (.*)\n((?:.+\n)+)```", TEXT)
QUOTED = re.findall(r"```text\n((?:.+\n)+)```", TEXT)
BEFORE = re.findall(r"```sh\nrotationzoo (.*)\n```", TEXT)
LEAST = {"Error": 12, "Hint": 5}  # letters that a text in the code must have of its own


@cache
def texts() -> list[list[str]]:
    """Every text in the code, in parts; what is filled in is an empty one."""
    made = []
    for path in (ROOT / "rotationzoo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            fixed = [getattr(part, "value", None) for part in parts]
            made.append([word if isinstance(word, str) else "" for word in fixed])
    return made


def is_in_the_code(kind: str, sentence: str) -> bool:
    likely = [parts for parts in texts() if all(part in sentence for part in parts)]
    patterns = [
        "".join(re.escape(part) or ".+?" for part in parts)
        for parts in likely
        if len("".join(parts)) >= LEAST[kind]
    ]
    return any(re.fullmatch(pattern, sentence) for pattern in patterns)


def test_the_page_has_the_most_frequent_errors():
    assert len(SHOWN) + len(QUOTED) >= 20
    headings = re.findall(r"^### (.*)", TEXT, re.MULTILINE)
    assert len(headings) == len(set(headings)) == len(SHOWN) + len(QUOTED)


@pytest.mark.parametrize(("words", "printed"), SHOWN, ids=[words for words, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(words, printed, inside, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for command in BEFORE:
        if "rotations/" in words:
            assert inside(*shlex.split(command)).returncode == 0
    ran = inside(*shlex.split(words))
    assert ran.returncode in (1, 2)
    assert ran.stderr == printed


@pytest.mark.parametrize("quoted", QUOTED, ids=[quoted.splitlines()[0] for quoted in QUOTED])
def test_a_sentence_is_one_that_the_code_says(quoted):
    for line in quoted.splitlines():
        kind, _, sentence = line.partition(": ")
        assert is_in_the_code(kind, sentence), f"no template gives: {sentence}"


def test_a_sentence_that_nobody_says_is_not_passed():
    assert not is_in_the_code("Error", "MODEL is too beautiful for this machine")
