"""What a terminal is sent: no control characters of others, no word broken, one JSON object."""

import io
import json
import shutil
import sys

import pytest
from support.command_line import TITLE, edited_manifest
from support.reports import listed

from rotationzoo.cli.app import main
from rotationzoo.cli.output import Output, say, show_error, table, visible
from rotationzoo.errors import RotationZooError

CONTROLS = "\x1b\x07\r\n\b\x7f\x9b\u202e\u2066\u200b\u2028\ufeff\udcff\x00"


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize("character", list(CONTROLS), ids=ascii)
def test_a_control_character_is_shown_and_not_obeyed(character, capsys):
    letters, text = "Qwen3-8B ±½ 模型 модель ñ é 🙂", f"a{character}b"
    assert visible(letters) == letters
    assert visible(text).isprintable()
    assert visible(text) not in ("ab", text), "what was hidden is to be seen"
    say(text)
    table(text, [text], [[text]])
    show_error(RotationZooError(text, hint=text))
    Output().note(text)
    Output(quiet=True).result({}, text.replace("\n", ""), lambda: None)
    printed = capsys.readouterr()
    assert all(line.isprintable() for line in (printed.out + printed.err).split("\n"))


@pytest.mark.hostile("terminal")
def test_names_with_escape_characters(inside, artifact):
    """Whoever wrote the name, and whichever way it takes to the screen."""
    entry = listed(1, recipe=f"x{TITLE}", format="oscar", files={"k.pt": {}})
    (inside.folder / "index.json").write_text(json.dumps({"schema": 1, "entries": [entry]}))
    (inside.folder / f"r{TITLE}.yaml").write_text(json.dumps({f"key{TITLE}": 1}))
    (inside.folder / "text.jsonl").write_text(json.dumps({f"body{TITLE}": "x"}) + "\n")
    copied = inside.folder / f"c{TITLE}"
    shutil.copytree(artifact, copied)
    with edited_manifest(copied) as manifest:
        manifest["model"]["id"] = f"m{TITLE}"
    for words in (
        ["list", "--index", "index.json"],
        ["calibrate", f"./m{TITLE}"],
        ["calibrate", "demo", "--recipe", f"r{TITLE}.yaml"],
        ["inspect", f"nowhere{TITLE}"],
        ["inspect", copied],
        ["calibrate", "demo", "--data", "text.jsonl", "--column", "y"],
        ["calibrate", f"--{TITLE}"],
        [f"calibrate{TITLE}"],
    ):
        result = inside(*words)
        sent = result.stdout + result.stderr
        assert "owned" in sent
        assert not {"\x1b", "\x07"} & set(sent), repr(sent)


@pytest.mark.hostile("terminal")
def test_json_has_no_raw_characters_and_no_nan(capsys):
    hostile = {"name": f"x{TITLE}\udcff\u202e", "a": [float("nan"), (float("inf"), 1.5)]}
    Output(json=True).result(hostile, "", lambda: None)
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "\x1b" not in printed
    assert json.loads(printed, parse_constant=pytest.fail) == hostile | {"a": [None, [None, 1.5]]}


def test_what_stdout_cannot_encode_is_escaped(monkeypatch, made, tmp_path):
    """A name where the locale is ASCII."""
    folder = shutil.copytree(made, tmp_path / "ä")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit):
        main(["verify", str(folder)])
    sys.stdout.flush()
    assert b"\\xe4 is sound" in sys.stdout.buffer.getvalue()


@pytest.mark.parametrize(("width", "count"), [(40, 4), (80, 2), (160, 1)])
def test_a_terminal_breaks_lines_between_words_at_its_own_width(terminal, width, count):
    screen, words = terminal(width), " ".join(["orthogonality", "error of |R R^T - I|"] * 4)
    say(words)
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == words
    assert len(lines) == count


@pytest.mark.parametrize("start", ["", "pip install 'vllm==0.33.0' && "])
def test_a_command_is_in_one_piece(terminal, capsys, start):
    command = f"{start}rotationzoo calibrate {'m' * 90} --tokens 65536 --output {'o' * 30}"
    screen = terminal(80)
    say(f"Hint: go on with: {command}")
    assert screen.getvalue().splitlines() == ["Hint: go on with:", f"  {command}"]
    capsys.readouterr()
