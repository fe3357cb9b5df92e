"""`rotationzoo demo`: the whole story on the model that ships with rotationzoo, in a minute."""

from pathlib import Path
from typing import Annotated

from rotationzoo.cli.library_logs import hush_libraries
from rotationzoo.cli.options import Json, Quiet, Restart, follow_link, option
from rotationzoo.cli.output import Output
from rotationzoo.cli.progress_bar import show_progress

MODEL, RECIPE = "demo", "oscar"
BASELINES = ("identity", "hadamard")
TASKS = ("needles", "key-value")
QUESTIONS = 16
"""Of each task, in two prompts."""
PROMPT = 2048
"""Tokens of a prompt."""
TEXT = 1024
"""Tokens of each of two texts, for perplexity with a standard error."""


def demo_command(
    output: Annotated[
        Path | None,
        option("Folder of the artifact and its page (rotations/demo).", "--output", "-o"),
    ] = None,
    restart: Restart = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Calibrate a small model that ships with rotationzoo, ask it about its context, and draw the
    report.

    It takes about a minute, and needs no network and no GPU.

    rotationzoo demo
    """
    out = Output(json, quiet)
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.calibration.job import calibrate
    from rotationzoo.calibration.plan import Job
    from rotationzoo.cli.demo_view import show_demo
    from rotationzoo.cli.report import add_report
    from rotationzoo.evaluation.job import Evaluation, evaluate
    from rotationzoo.evaluation.tasks.prompts import TaskSettings
    from rotationzoo.recipe import Data, load

    hush_libraries()
    folder = follow_link(output) or Path("rotations") / MODEL
    job = Job(MODEL, load(RECIPE), folder, restart=restart, fit_length=True)
    with show_progress(out) as progress:
        calibrate(job, progress)
        evaluation = Evaluation(
            model=MODEL,
            artifacts=[folder],
            data=Data(tokens=2 * TEXT, length=TEXT),
            tasks=TaskSettings(TASKS, (PROMPT,), QUESTIONS),
            baselines=BASELINES,
            save_to=[folder],
        )
        report = evaluate(evaluation, progress)
        progress("drawing the page", 0, 0)
        artifact = add_report(Artifact.open(folder))
    show_demo(out, artifact, report)
    out.suggest("generate", MODEL, "--rotations", str(folder), "--compare")
