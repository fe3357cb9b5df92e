"""`rotationzoo demo`: the whole story on the model that ships with rotationzoo, in a minute."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rotationzoo.cli.output import Output, say, table
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.settings import CalibrationSettings, EvaluationSettings, Restart
from rotationzoo.settings_base import option
from rotationzoo.storage.folders import follow_link

MODEL = "demo"
BASELINES = ("identity", "hadamard")
ASKED = ("needles", "key-value")
PROMPTS, FIRST = 10, 4  # of each task, and those for the caches that decide nothing
TOKENS = 16384  # of the calibration: half of the usual number, in half of the time
LENGTH = 1024  # tokens of a prompt, and of each of two texts for perplexity with a standard error


def demo_command(
    out: Output,
    output: Path | None = option("Folder of the artifact (rotations/demo).", "--output", "-o"),
    restart: Restart = False,
) -> None:
    """Calibrate a small model that ships with rotationzoo, ask it about its context, and write the
    report.

    It takes about a minute, and needs no network and no GPU.

    rotationzoo demo
    """
    from rotationzoo.api import calibration_job, evaluation_job
    from rotationzoo.artifact.scores import kept_share
    from rotationzoo.artifact.store import REPORT, Artifact
    from rotationzoo.calibration.calibrate import calibrate
    from rotationzoo.cli.report import add_report
    from rotationzoo.codec.size import CONTEXT, EXACT_BITS
    from rotationzoo.evaluation.decision import SIMPLEST
    from rotationzoo.evaluation.evaluate import evaluate
    from rotationzoo.recall.questions import TASKS
    from rotationzoo.report.page import EXACT, label_arms
    from rotationzoo.words import percent

    folder = follow_link(output) or Path("rotations") / MODEL
    job = calibration_job(CalibrationSettings(MODEL, output=folder, restart=restart, tokens=TOKENS))
    of_prompt = min(TASKS[task] for task in ASKED)
    asked = EvaluationSettings(
        MODEL,
        folder,
        save=True,
        tokens=2 * LENGTH,
        length=LENGTH,
        tasks=ASKED,
        questions=PROMPTS * of_prompt,
        baselines=BASELINES,
    )
    evaluation = evaluation_job(asked)
    tasks = replace(evaluation.tasks, first=FIRST * of_prompt)
    with show_progress(out) as progress:
        calibrate(job, progress)
        report = evaluate(replace(evaluation, record=False, tasks=tasks), progress)
        progress("drawing the page", 0, 0)
        artifact = add_report(out, Artifact.open(folder))
    shown: list[tuple[str, Any]] = label_arms(report, artifact.identity).shown
    caches, rows = dict[str, Any](), list[list[str]]()
    for label, arm in [(EXACT, report.exact), *sorted(shown, key=lambda each: each[1].rounding)]:
        words, bits = label, float(EXACT_BITS)
        if label != EXACT:
            words = f"{arm.name} {label}" if arm.is_plain else SIMPLEST.get(arm.name, label)
            bits = arm.bits_per_element
        kept, count = kept_share(report.exact.tasks, arm.tasks), arm.all_tasks.questions
        caches[words] = {"bits_per_element": bits, "kept": kept, "questions": count}
        rows.append([words, f"{bits:.1f}", percent(kept), str(count)])
    page, seconds = str(artifact.folder / REPORT), artifact.manifest.run.seconds

    def human() -> None:
        say(f"Rotations of the demo model, made in {seconds:.1f} s: {artifact.folder}")
        table("Answers that are kept", ["cache", "bits", "kept", "asked"], rows, apart=True)
        say(
            f"bits: of a cached element at {CONTEXT:,} tokens, exact ones included",
            "RotatedCache and serve give each channel 0 to 8 bits, most engines the same to all",
            f"Easy questions in {LENGTH:,} tokens; evaluate also asks for quotes, which lose more",
            "",
            *report.window.verdict.words[:1],
            f"The page about it: {page}",
        )

    data = {"artifact": str(artifact.folder), "page": page, "seconds": seconds, "caches": caches}
    out.result(data, str(artifact.folder), human)
    out.suggest("generate", MODEL, "--rotations", str(folder), "--compare")
