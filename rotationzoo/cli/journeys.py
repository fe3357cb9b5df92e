"""What `rotationzoo` prints without a command: what people come for, and the commands for it."""

_MODEL = "Qwen/Qwen3-8B"
_JOURNEYS = (
    ("demo", "see it work: a minute, no network"),
    (f"pull {_MODEL} --to sglang", "fetch rotations for an engine"),
    (f"plan {_MODEL}", "see what fits a GPU"),
    (f"calibrate {_MODEL}", "make rotations yourself"),
    (f"generate {_MODEL} -p 'Hi'", "write text through a 2-bit cache"),
    ("push FOLDER OWNER/REPO", "publish what you made"),
)
"""Command without its first word -> what it is for."""


def journey_lines() -> list[str]:
    """Ten lines of at most 80 columns."""
    width = max(len(command) for command, _ in _JOURNEYS)
    lines = ["rotationzoo: rotations with which a KV cache can be stored in 2 bits", ""]
    for command, purpose in _JOURNEYS:
        lines.append(f"  rotationzoo {command:{width}}  {purpose}")
    return [*lines, "", "All commands: rotationzoo --help"]
