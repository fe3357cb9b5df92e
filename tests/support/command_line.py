"""What tests of the command line ask of a run: its one error, and the files that it left."""

SMALL = ["--tokens", "2048", "--length", "256"]
TITLE = "\x1b]0;owned\x07"  # sets the title of a terminal's window


def only_error(result, code: int = 1) -> str:
    """The run failed with this code, in one `Error:` line and at most one `Hint:` line; returns
    both."""
    assert result.returncode == code, result.stderr
    lines = without_stages(result.stderr.strip())
    assert lines[0].startswith("Error: "), result.stderr
    assert len(lines) <= 2, result.stderr
    assert all(line.startswith("Hint: ") for line in lines[1:]), result.stderr
    assert result.stdout == ""
    return result.stderr


def without_stages(errors: str) -> list[str]:
    """The lines of stderr without those that a slow run writes of its progress."""
    return [line for line in errors.splitlines() if not line.startswith("[")]


def left_behind(command) -> list[str]:
    """Every path in the folder that the command ran in."""
    return sorted(str(path.relative_to(command.folder)) for path in command.folder.rglob("*"))
