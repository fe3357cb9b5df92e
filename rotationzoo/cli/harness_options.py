"""The options of `evaluate --harness`, and the settings that they make."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rotationzoo.errors import UsageError

if TYPE_CHECKING:
    from rotationzoo.evaluation.harness.tasks import HarnessSettings

HarnessTasks = Annotated[
    str | None,
    typer.Option("--harness", help="Tasks of lm-evaluation-harness, as gsm8k,niah_single_1."),
]
HarnessLimit = Annotated[
    int | None, typer.Option(min=1, help="Questions of each of these tasks; all by default.")
]
HarnessPath = Annotated[
    Path | None, typer.Option(help="A folder of your own task files, which may run code.")
]
HarnessChat = Annotated[
    bool, typer.Option("--harness-chat", help="Ask them in the model's chat template.")
]


HarnessAnswers = Annotated[
    int, typer.Option("--harness-answers", min=0, help="Answers to each task that are shown, too.")
]


def parse_harness(
    names: str | None, limit: int | None, folder: Path | None, chat: bool, answers: int = 0
) -> "HarnessSettings | None":
    """The settings of `--harness NAME,NAME`; None without it. Raises `UsageError`."""
    from rotationzoo.evaluation.harness.tasks import HarnessSettings

    if names is None:
        if folder is not None or limit is not None or chat or answers:
            raise UsageError(
                "--harness-limit, --harness-path, --harness-chat and --harness-answers are for the "
                "tasks of --harness",
                hint="name them: --harness gsm8k",
            )
        return None
    tasks = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    if not tasks:
        raise UsageError("--harness names no task", hint="write it as: --harness gsm8k,hellaswag")
    return HarnessSettings(tuple(tasks), limit, folder, chat, answers)
