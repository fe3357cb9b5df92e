"""What the command line shows who comes for the first time: the journeys, and after each command
the next one."""

import shlex
from pathlib import Path

import pytest
from support.command_line import SMALL, without_stages
from support.published import ok

from rotationzoo.cli.app import COMMANDS, journey_lines
from rotationzoo.evaluation.decision import SIMPLEST


def last_line(result) -> str:
    """The last line on stderr of a command that succeeded."""
    assert result.returncode == 0, result.stderr
    return without_stages(result.stderr)[-1]


def test_every_journey_is_a_command_that_its_own_parser_takes(inside):
    """All but the option that makes it stop before it does anything."""
    lines = inside().stdout.splitlines()
    assert lines == journey_lines(), "without a command"
    commands = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    names = [shlex.split(command)[1] for command in commands]
    wanted = {"demo", "pull", "calibrate", "evaluate", "report", "serve", "generate", "push"}
    assert wanted <= set(names) <= set(COMMANDS)
    assert names.index("serve") < names.index("export"), "vLLM comes before forks"
    for command in commands:
        assert inside(*shlex.split(command)[1:], "--help").returncode == 0
        if " serve " not in command:  # which hands on what it does not know
            wrong = inside(*shlex.split(command)[1:], "--no-such-option")
            assert "No such option" in wrong.stderr
    assert inside("--version").stdout.strip().count(".") == 2
    assert "'--recipe' requires an argument" in inside("calibrate", "demo", "--recipe").stderr


@pytest.mark.parametrize(
    ("words", "following"),
    [
        ("calibrate demo --dry-run --recipe hadamard", "calibrate demo --recipe hadamard"),
        ("inspect {made}", "evaluate demo {made} --save"),
        ("verify {made}", "verify {made} --model demo"),
        ("verify {made} --model demo", "generate demo --rotations {made}"),
        ("push {made} me/zoo --dry-run", "push {made} me/zoo"),
        ("plan {tiny} --context 100", "calibrate {tiny}"),
        ("list qwen3-8b --index bundled", "pull Qwen/Qwen3-8B --index bundled"),
        ("list nothing --index bundled", "calibrate MODEL"),
    ],
)
def test_a_command_ends_with_the_next_one(inside, made, tiny, words, following):
    words = words.format(made=made, tiny=tiny).split()
    result = inside(*words)
    assert last_line(result) == f"Next: rotationzoo {following.format(made=made, tiny=tiny)}"
    assert "Next" not in result.stdout
    for silent in ("--json", "--quiet"):
        assert "Next" not in inside(*words, silent).stderr


def test_the_next_command_is_quoted_for_the_shell(inside, tiny):
    made = inside("calibrate", tiny, *SMALL, "--recipe", "hadamard", "-o", "my rotations")
    assert last_line(made) == f"Next: rotationzoo evaluate {tiny} 'my rotations' --save"
    options = ["--tokens", 256, "--length", 128, "--tasks", "none", "--windows", "0/16"]
    measured = inside("evaluate", tiny, "my rotations", *options, "--save")
    for result in (measured, inside("inspect", "my rotations")):
        assert last_line(result) == "Next: rotationzoo report 'my rotations'"


@pytest.mark.slow
def test_the_demo_tells_the_story(command):
    told = ok(command("demo", "--json"))
    kept = {words: figures["kept"] for words, figures in told["caches"].items()}
    assert kept["exact model"] == 1
    assert min(kept, key=kept.__getitem__) == "no rotation"
    assert {"demo", "demo rounded one by one", *SIMPLEST.values()} <= kept.keys()
    page = Path(command.folder, told["page"]).read_text("utf-8")
    assert "Serve it: demo keeps" in page
    assert "rotations/demo</span>" in page
    assert "FOLDER" not in page
    again = command("demo", "--quiet")
    assert again.stdout.split() == ["rotations/demo"]
