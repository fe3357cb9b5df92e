"""`rotationzoo demo`: the whole story on the model that ships with rotationzoo, in a minute."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rotationzoo.cli.options import Restart, follow_link, option
from rotationzoo.cli.output import Output, say, table
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.words import counted

MODEL, RECIPE = "demo", "oscar"
BASELINES = ("identity", "hadamard")
TASKS = ("needles", "key-value")
QUESTIONS = 16  # of each task, in two prompts
PROMPT = 2048  # tokens
TEXT = 1024  # tokens of each of two texts, for perplexity with a standard error


def demo_command(
    out: Output,
    output: Path | None = option(
        "Folder of the artifact and its page (rotations/demo).", "--output", "-o"
    ),
    restart: Restart = False,
) -> None:
    """Calibrate a small model that ships with rotationzoo, ask it about its context, and draw the
    report.

    It takes about a minute, and needs no network and no GPU.

    rotationzoo demo
    """
    from rotationzoo.api import calibration_job, evaluation_job
    from rotationzoo.artifact.measured import arms_of
    from rotationzoo.artifact.store import REPORT, Artifact
    from rotationzoo.calibration.calibrate import calibrate
    from rotationzoo.cli.report import add_report
    from rotationzoo.codec.size import CONTEXT, EXACT_BITS
    from rotationzoo.evaluation.evaluate import evaluate

    folder = follow_link(output) or Path("rotations") / MODEL
    job = calibration_job(MODEL, folder, RECIPE, quick=True, length=PROMPT, restart=restart)
    asked = {"tasks": TASKS, "lengths": PROMPT, "questions": QUESTIONS, "baselines": BASELINES}
    evaluation = evaluation_job(MODEL, folder, True, tokens=2 * TEXT, length=TEXT, **asked)
    with show_progress(out) as progress:
        calibrate(job, progress)
        report = evaluate(replace(evaluation, record=False), progress)
        progress("drawing the page", 0, 0)
        artifact = add_report(out, Artifact.open(folder))
    # The artifact has factors for error feedback.
    arms = report.window.arms
    nearest, feedback = arms_of(arms, artifact.identity)
    measured: dict[str, Any] = {
        "exact": report.exact,
        "these rotations, in most engines": nearest,
        "these rotations, in RotatedCache or serve": feedback,
        "an uncalibrated rotation": arms["hadamard"],
        "no rotation": arms["identity"],
    }
    caches: dict[str, Any] = {}
    rows = []
    for words, arm in measured.items():
        bits = float(EXACT_BITS) if words == "exact" else arm.bits_per_element
        recall = arm.all_tasks
        figures = recall.model_dump(include={"answered", "questions", "log_probability"})
        caches[words] = {"bits_per_element": bits, **figures, "perplexity": arm.perplexity}
        rows.append([words, f"{bits:.1f}", f"{recall.share:.0%}"])
    page, seconds = str(artifact.folder / REPORT), artifact.manifest.run.seconds

    def human() -> None:
        layers = counted(len(artifact.rotations), "layer")
        made = f"Rotations of the demo model ({layers}), made in {seconds:.1f} s"
        say(f"{made}: {artifact.folder}")
        questions = counted(caches["exact"]["questions"], "question")
        title = f"{questions} about statements hidden in {PROMPT:,} tokens"
        table(title, ["cache", "bits", "answered"], rows, apart=True)
        say(
            f"bits: of a cached element at {CONTEXT:,} tokens, exact ones included",
            "RotatedCache and serve round the numbers of a row together, most engines one by one",
            "These questions are easy: evaluate also asks for copies and quotes, which lose more",
            "",
            f"The page about it: {page}",
        )

    data = {"artifact": str(artifact.folder), "page": page, "seconds": seconds, "caches": caches}
    out.result(data, str(artifact.folder), human)
    out.suggest("generate", MODEL, "--rotations", str(folder), "--compare")
