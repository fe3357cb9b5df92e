"""Parsing the values of shared options: windows, clip ratios, tasks, folders,
hubs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.errors import UsageError
from rotationzoo.zoo.hubs.registry import HUB_NAMES

if TYPE_CHECKING:
    from rotationzoo.evaluation.tasks.prompts import TaskSettings


def parse_windows(text: str | None) -> list[tuple[int, int]]:
    """Parse `64/256,128/1024` to pairs of sink and recent tokens. Raises `UsageError`."""
    windows = []
    for part in filter(None, (text or "").split(",")):
        sink, _, recent = part.partition("/")
        if not (sink.strip().isdecimal() and recent.strip().isdecimal() and part.isascii()):
            raise UsageError(
                f"--windows has no sink/recent in {part!r}",
                hint="write it as: --windows 64/256,128/1024",
            )
        windows.append((int(sink), int(recent)))
    return list(dict.fromkeys(windows))


def parse_window(text: str | None) -> tuple[int, int] | None:
    """Parse `64/256` to one pair of sink and recent tokens. Raises `UsageError`."""
    if text is None:
        return None
    windows = parse_windows(text)
    if len(windows) != 1:
        raise UsageError(
            f"--windows {text} is not one pair of sink/recent", hint="write it as: --windows 64/256"
        )
    return windows[0]


def parse_clip(text: str | None) -> tuple[float, float] | None:
    """Parse `0.96/0.92` to the clip ratios of keys and of values.

    A single number applies to both. Raises `UsageError`.
    """
    if text is None:
        return None
    try:
        ratios = [float(part) for part in text.split("/")]
    except ValueError:
        ratios = []
    if len(ratios) not in (1, 2) or not all(0 < ratio <= 1 for ratio in ratios):
        raise UsageError(
            f"--clip {text} is no clip ratio above 0 and at most 1",
            hint="write it as: --clip 0.96/0.92",
        )
    return ratios[0], ratios[-1]


def parse_tasks(tasks: str, lengths: str | None, questions: int) -> "TaskSettings":
    """Parse the names of recall tasks, such as `needles,copy`, `all` or `none`, and the lengths of
    their prompts, such as `2048,8192`. Raises `UsageError`."""
    from rotationzoo.evaluation.tasks.prompts import TaskSettings

    settings = TaskSettings(questions=questions)
    if lengths is not None:
        parts = [part.strip() for part in lengths.split(",")]
        if not all(part.isdecimal() and part.isascii() for part in parts):
            raise UsageError(
                f"--lengths {lengths} is no list of numbers of tokens",
                hint="write it as: --lengths 2048,8192",
            )
        settings = replace(settings, lengths=tuple(dict.fromkeys(map(int, parts))))
    if tasks == "all":
        return settings
    names: list[str] = []
    if tasks != "none":
        names = [name.strip() for name in tasks.split(",")]
    settings = replace(settings, names=tuple(dict.fromkeys(names)))
    settings.check()
    return settings


def default_output(model: str, suffix: str) -> Path:
    """The folder `rotations/MODEL-SUFFIX`.

    For a local model, MODEL is the folder's name, even if its path is `.`.
    """
    path = Path(model)
    name = path.resolve().name if path.is_dir() else path.name
    return Path("rotations") / f"{name}-{suffix}"


def follow_link(folder: Path | None) -> Path | None:
    """The folder that the user named or, if it is a symbolic link, the folder that it leads to.

    Use this only for folders that the user named. A link in a default place may have been planted
    by anybody, and must not be followed.
    """
    if folder is None:
        return None
    folder = folder.expanduser()
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def chosen_hubs(choice: str) -> list[str]:
    """The hubs that a choice stands for; `both` and `any` mean all of them."""
    return list(HUB_NAMES) if choice in ("both", "any") else [choice]
