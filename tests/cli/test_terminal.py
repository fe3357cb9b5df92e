"""What a terminal is sent: no control characters of others, no traceback, no word broken, one JSON
object."""

import json
import os
import pty
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from io import StringIO

import pytest
from support.models import save_tiny

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.cli import output
from rotationzoo.cli.export_view import fold_command
from rotationzoo.cli.progress import show_progress
from rotationzoo.recipe import load
from rotationzoo.zoo.index import WHEEL_COPY

TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal's window


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    model = save_tiny(folder / "tiny")
    return calibrate(
        Job(model=str(model), recipe=load("hadamard"), output=folder / "out", device="cpu")
    ).folder


@pytest.fixture
def terminal(monkeypatch):
    """Stdout as a terminal of a width, and what was written to it."""

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    def open_(width: int) -> StringIO:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return open_


def sent(result) -> str:
    return result.stdout + result.stderr


def plain(screen: str) -> str:
    """Without the bold of a table's head, which is our own."""
    return screen.replace("\x1b[1m", "").replace("\x1b[0m", "")


# ---- control characters


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize(
    "character",
    [
        "\x1b",
        "\x07",
        "\r",
        "\n",
        "\b",
        "\x7f",
        "\x9b",
        "\u202e",
        "\u2066",
        "\u200b",
        "\u2028",
        "\ufeff",
        "\udcff",
        "\x00",
    ],
    ids=ascii,
)
def test_a_control_character_is_shown_and_not_obeyed(character, capsys):
    shown = output.visible(f"a{character}b")
    assert shown.isprintable()
    assert shown not in ("ab", f"a{character}b"), "what was hidden is to be seen"
    output.say(f"a{character}b")
    output.table(f"a{character}b", [f"a{character}b"], [[f"a{character}b"]])
    output.show_error(output.RotationZooError(f"a{character}b", hint=f"a{character}b"))
    output.Output().note(f"a{character}b")
    output.Output(quiet=True).result({}, f"a{character}b".replace("\n", ""), lambda: None)
    printed = capsys.readouterr()
    assert all(line.isprintable() for line in (printed.out + printed.err).split("\n"))


def test_letters_of_all_languages_stay_as_they_are():
    assert output.visible("Qwen3-8B ±½ 模型 модель ñ é 🙂") == "Qwen3-8B ±½ 模型 модель ñ é 🙂"


def index_of(recipe: str) -> str:
    entry = {
        "model": "a/b", "recipe": recipe, "format": "oscar", "files": {"k.pt": {}},
        "copies": [{"hub": "huggingface", "repo": "a/b", "path": "x"}],
    }  # fmt: skip
    return json.dumps({"schema": 1, "entries": [entry]})


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize(
    "place", ["recipe", "model", "key", "folder", "manifest", "column", "option", "command"]
)
def test_names_with_escape_characters(inside, artifact, place):
    """Whoever wrote the name, on whatever way it comes to the screen."""
    (inside.folder / "index.json").write_text(index_of(f"x{TITLE}"))
    (inside.folder / f"r{TITLE}.yaml").write_text(json.dumps({f"key{TITLE}": 1}))
    (inside.folder / "text.jsonl").write_text(json.dumps({f"body{TITLE}": "x"}) + "\n")
    copied = inside.folder / f"c{TITLE}"
    shutil.copytree(artifact, copied)
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["model"]["id"] = f"m{TITLE}"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    words = {
        "recipe": ["list", "--index", "index.json"],
        "model": ["calibrate", f"./m{TITLE}"],
        "key": ["calibrate", "demo", "--recipe", f"r{TITLE}.yaml"],
        "folder": ["inspect", f"nowhere{TITLE}"],
        "manifest": ["inspect", copied],
        "column": ["calibrate", "demo", "--data", "text.jsonl", "--column", "y"],
        "option": ["calibrate", f"--{TITLE}"],
        "command": [f"calibrate{TITLE}"],
    }[place]
    result = inside(*words)
    assert "owned" in sent(result)
    assert not {"\x1b", "\x07"} & set(sent(result)), repr(sent(result))


@pytest.mark.hostile("terminal")
def test_json_has_no_raw_characters_and_no_nan(capsys):
    hostile = {
        "name": f"x{TITLE}\udcff\u202e",
        "a": [float("nan"), (float("inf"), 1.5)],
        "b": {"c": 1},
    }
    output.Output(json=True).result(hostile, "", lambda: None)
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "\x1b" not in printed
    assert json.loads(printed, parse_constant=pytest.fail) == hostile | {"a": [None, [None, 1.5]]}


@pytest.mark.hostile("terminal")
def test_a_stage_of_a_job_is_no_markup_and_has_no_escapes(monkeypatch):
    screen = StringIO()
    real = output.Console
    monkeypatch.setattr(
        output,
        "Console",
        lambda **_: real(file=screen, force_terminal=True, width=80, color_system=None),
    )
    with show_progress(output.Output()) as progress:
        progress(f"fetching [bold]x{TITLE}", 1, 2)
    assert "fetching [bold]x\\x1b]0;owned\\x07" in screen.getvalue()
    assert "\x07" not in screen.getvalue()


def test_what_stdout_cannot_encode_is_escaped(command):
    """`±` of a table where the locale is ASCII."""
    made = command(
        "calibrate",
        "demo",
        "--tokens",
        "2048",
        "--output",
        "ä",
        "--quiet",
        env={"PYTHONIOENCODING": "ascii"},
    )
    assert (made.returncode, made.stdout) == (0, "\\xe4\n"), made.stderr


# ---- what nobody foresaw


DEEP = "[" * 100_000


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("index.json", DEEP, ["list", "--index", "index.json"]),
        ("index.json", '{"schema": 1' + "0" * 5000 + "}", ["list", "--index", "index.json"]),
        ("deep.yaml", "a: " + DEEP, ["calibrate", "demo", "--recipe", "deep.yaml"]),
        ("long.yaml", "sink: 1" + "0" * 5000, ["calibrate", "demo", "--recipe", "long.yaml"]),
        ("manifest.json", DEEP, ["verify", "."]),
        ("manifest.json", '{"schema": 1' + "0" * 5000 + "}", ["inspect", "."]),
        ("config.json", DEEP, ["calibrate", "."]),
        ("text.jsonl", DEEP, ["calibrate", "demo", "--data", "text.jsonl"]),
    ],
    ids=[
        "deep index",
        "long number",
        "deep recipe",
        "long number in it",
        "deep manifest",
        "long",
        "deep config",
        "deep text",
    ],
)
def test_one_line_instead_of_a_traceback(inside, file, content, words):
    (inside.folder / file).write_text(content)
    result = inside(*words)
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] in (["Error"], ["Error", "Hint"]), result.stderr
    assert max(map(len, lines)) < 1200


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize(
    "answer",
    [
        b"\x1b]0;owned\x07 nonsense\r\n\r\n",
        b"HTTP/1.1 500 \x1b]0;owned\x07\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"\x1b" * 99,
    ],
    ids=["no status line", "an error's words", "nothing", "no index"],
)
def test_what_a_server_answers_is_one_line(inside, answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        result = inside(
            "list", "--index", f"http://127.0.0.1:{server.getsockname()[1]}/zoo_index.json"
        )
    assert result.returncode == 1
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) <= 2
    assert not {"\x1b", "\x07"} & set(result.stderr)


@pytest.mark.hostile("terminal")
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (KeyError("weight"), "KeyError: 'weight'"),
        (MemoryError(), "MemoryError"),
        (ValueError("\n\n \x1b[2J"), r"ValueError: \x1b[2J"),
        (ValueError("x" * 100_000), "ValueError: xxx"),
        (OSError("no number"), "OSError: no number"),
    ],
    ids=["two lines", "a key", "empty", "escapes", "long", "no strerror"],
)
def test_an_unforeseen_error_is_its_type_and_first_line(inside, monkeypatch, error, says):
    def fail(*_):
        raise error

    monkeypatch.setattr("rotationzoo.artifact.store.Artifact.open", fail)
    result = inside("inspect", "x")
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"Error: {says}")
    assert len(first) < 1100
    assert "ROTATIONZOO_DEBUG=1" in second
    assert output.visible(json.loads(inside("inspect", "x", "--json").stdout)["error"]).startswith(
        says
    )
    monkeypatch.setenv("ROTATIONZOO_DEBUG", "1")
    asked_for = inside("inspect", "x").stderr
    assert "Traceback" in asked_for
    assert "\x1b" not in asked_for


# ---- JSON that fails


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["inspect", "nowhere"], 1, "nowhere is no artifact"),
        (["calibrate", "./nowhere"], 1, "there is no folder ./nowhere"),
        (["calibrate"], 2, "Missing argument 'model'"),
        (
            ["calibrate", "demo", "--device", "x"],
            2,
            "Invalid value for '--device': 'x' is not one of 'auto', 'cpu', 'cuda'",
        ),
        (["calibrate", "demo", "--tokens", "0"], 2, "tokens = 0"),
        (["nonsense"], 2, "No such command 'nonsense'"),
    ],
)
def test_json_that_fails_is_an_object_with_the_error(inside, words, code, says):
    result = inside(*words, "--json")
    assert result.returncode == code
    content = json.loads(result.stdout)
    assert set(content) == {"error", "hint"}
    assert says in content["error"]
    assert result.stderr.splitlines()[0] == f"Error: {content['error']}", (
        "people read it where they always do"
    )
    assert inside(*words).stdout == ""


def test_a_result_that_is_no_stays_the_one_object(inside, artifact):
    shutil.copytree(artifact, inside.folder / "out")
    with open(inside.folder / "out" / "rotations.safetensors", "ab") as file:
        file.write(b"x")
    result = inside("verify", "out", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["ok"] is False
    assert "Error: out is not to be used" in result.stderr


# ---- lines and their ends


LEGEND = "rank: effective rank of the statistic; top1, top8: share of its strongest directions; error: largest |R R^T - I|"


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_terminal_breaks_lines_between_words_at_its_own_width(terminal, width):
    screen = terminal(width)
    output.say(LEGEND)
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == LEGEND
    assert len(lines) == {40: 3, 80: 2, 160: 1}[width]


def test_a_command_is_in_one_piece(terminal, capsys):
    command = f"rotationzoo calibrate {'m' * 90} --tokens 65536 --output {'o' * 30}"
    screen = terminal(80)
    output.say(f"Hint: go on with: {command}")
    assert screen.getvalue().splitlines() == ["Hint: go on with:", f"  {command}"]
    capsys.readouterr()


def test_a_file_gets_whole_lines(capsys):
    output.say(LEGEND)
    output.table("x", ["name", "number"], [["n" * 200, "1"]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == LEGEND
    assert lines[-1] == f"{'n' * 200}       1"


def test_a_long_command_has_a_flag_a_line_and_is_the_same_command():
    command = "python -m sglang.launch_server --model-path 'my --model' --kv-cache-dtype int2 --kv-cache-quant-group-size 64"
    folded = fold_command(command)
    assert max(map(len, folded)) < 80
    assert shlex.split("\n".join(folded).replace("\\\n", "")) == shlex.split(command)
    assert fold_command("vllm serve x --y") == ["vllm serve x --y"]
    python = f"config = OscarConfig(group_size=64, note='--x', rotation_dir=Path(\"{'p' * 80}\"))"
    assert fold_command(python) == [python]
    assert fold_command(f"# a comment --{'x' * 90}") == [f"# a comment --{'x' * 90}"]


@pytest.mark.parametrize("width", [60, 80])
def test_no_cell_of_a_table_is_cut(terminal, width):
    screen = terminal(width)
    name, numbers = (
        "Qwen3-4B-Thinking-2507-imported" * 2,
        ["+12.34% ±10.12%", "0.0012 ±0.0001", "0.0800 ±0.0038", "3.03"],
    )
    output.table(
        "title", ["arm", "perplexity", "attention KL", "block error", "bits"], [[name, *numbers]]
    )
    lines = plain(screen.getvalue()).splitlines()
    assert "…" not in screen.getvalue()
    assert all(number in lines[2] for number in numbers)
    assert "".join(line.split("  ")[0].strip() for line in lines[2:]) == name
    assert width == 60 or max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_on_a_real_terminal(command, width):
    """calibrate, inspect and export in a pseudo-terminal: no line is longer than it is wide, but
    what is to be copied."""
    assert (
        command("calibrate", "demo", "--tokens", "2048", "--output", "out", "--quiet").returncode
        == 0
    )
    for words in (["inspect", "out"], ["export", "out", "--to", "sglang", "-o", "e"]):
        main, side = pty.openpty()
        environment = {**command.environment, "COLUMNS": str(width), "TERM": "xterm"}
        running = subprocess.Popen(
            [sys.executable, "-m", "rotationzoo", *words],
            cwd=command.folder,
            env=environment,
            stdout=side,
            stderr=side,
        )
        os.close(side)
        screen = b""
        try:
            while part := os.read(main, 65536):
                screen += part
        except OSError:  # Linux: the other side is closed
            pass
        assert running.wait(60) == 0, screen
        lines = plain(screen.decode()).split("\r\n")
        assert all(line.isprintable() for line in lines), lines
        assert all(len(line) <= width or "_PATH=" in line for line in lines), lines
        if words[0] == "inspect":
            assert lines[-2].startswith("rank: ") == (width == 160), (
                "legends are as wide as the terminal"
            )


# ---- what is shown


def test_help_is_in_the_order_of_the_journey_and_in_words(inside):
    shown = inside("--help").stdout
    order = [
        "calibrate",
        "inspect",
        "verify",
        "evaluate",
        "validate",
        "report",
        "export",
        "import",
        "list",
        "pull",
        "push",
    ]
    places = [shown.index(f"│ {name} ") for name in order]
    assert places == sorted(places)
    assert places[-1] < shown.index("│ regenerate ")
    for words in (["import", "--help"], ["evaluate", "--help"]):
        assert "list[" not in inside(*words).stdout
    assert "best-uncentered" in inside("calibrate", "--help").stdout


def test_calibrate_says_in_short_what_inspect_has_a_table_for(inside):
    words = ["calibrate", "demo", "--tokens", "2048", "--output", "out"]
    made = inside(*words)
    assert (
        made.stderr.splitlines()[-1]
        == "Next, what it costs the model: rotationzoo evaluate demo out"
    )
    first = made.stdout
    assert "demo, recipe oscar: 4 layers, effective rank of keys" in first
    assert "2,048 tokens in" in first
    assert "K dim" not in first
    assert "K dim" in inside("inspect", "out").stdout
    again = inside(*words)
    assert "done already" in again.stderr
    assert "tokens in" not in again.stdout, "the time of another day"


def test_list_has_no_equal_rows_and_no_empty_columns(inside):
    """Of the index that comes with the package, and of one whose entries have been evaluated."""
    lines = inside("list", "--index", WHEEL_COPY).stdout.splitlines()[1:]
    assert "revision" not in lines[0], "nobody has published one"
    assert "cost" not in lines[0]
    assert len(set(lines)) == len(lines)
    assert max(map(len, lines)) <= 80
    assert lines[-2].startswith("(1) from the folder ")
    assert sum("(1)" in line for line in lines) == 2
    content = json.loads(WHEEL_COPY.read_text())
    measured = {
        "text": "x",
        "tokens": 9,
        "perplexity": 2.0,
        "format": "sglang",
        "sink": 0,
        "recent": 0,
    }
    arm = {"perplexity_increase": 0.0123, "attention_kl": None, "output_error": 0.1}
    for entry in content["entries"]:
        entry["evaluation"] = {**measured, "arms": {"mine": arm}}
    (inside.folder / "index.json").write_text(json.dumps(content))
    lines = inside("list", "--index", "index.json").stdout.splitlines()
    assert "cost" in lines[1]
    assert all("+1.23%" in line for line in lines[2:-2])
