"""What `evaluate` prints of recall tasks: the share of answers of each arm, by task and by
distance."""

from typing import Any

from rotationzoo.cli.output import say, table
from rotationzoo.words import counted


def show_answers(report: dict[str, Any], window: dict[str, Any]) -> None:
    """Print what the exact model and each arm answered with one pair of windows. Nothing is printed
    if no question was asked of the arms."""
    if report["exact"]["all_tasks"] is None:
        return
    models = {"exact": report["exact"], **window["arms"]}
    some_arm = next(iter(window["arms"].values()))
    tasks, distances = list(some_arm["tasks"]), some_arm["all_tasks"]["by_distance"]
    rows, by_task, by_distance = [], [], []
    for name, model in models.items():
        summary, error = model["all_tasks"], model["all_tasks"]["standard_error"]
        share = summary["answered"] / summary["questions"]
        answered = _with_error(f"{share:.1%}", error["answered"], ".1%")
        logs = _with_error(f"{summary['log_probability']:.2f}", error["log_probability"], ".2f")
        rows.append([name, answered, logs])
        by_task.append([name, *[_score(model["tasks"][task]) for task in tasks]])
        by_distance.append([name, *map(_score, summary["by_distance"])])
    table("recall: all tasks", ["arm", "answered", "log probability"], rows, apart=True)
    table("recall by task", ["arm", *tasks], by_task, apart=True)
    starts = [f"from {bucket['from']:,}" for bucket in distances]
    table("recall by distance", ["arm", *starts], by_distance, apart=True)


def explain_answers(report: dict[str, Any]) -> None:
    """Print what the figures of `show_answers` are."""
    summary = report["exact"]["all_tasks"]
    if summary is None:
        return
    lengths = " and ".join(f"{length:,}" for length in report["tasks"]["lengths"])
    cache = "a cache that stores 2 bits" if report["real_cache"] else "a simulated 2-bit cache"
    say(
        f"recall: {counted(summary['questions'], 'question')} about statements hidden in {lengths} "
        f"tokens, which every arm reads quantized from {cache}; answered: share that is exactly "
        "right ± standard error over prompts; log probability: of the right answer, in nats, also "
        "beside the shares; distance: tokens from statement to answer"
    )


def _score(score: dict[str, Any]) -> str:
    return f"{score['answered'] / score['questions']:.0%} {score['log_probability']:.1f}"


def _with_error(value: str, error: float | None, format: str) -> str:
    return value if error is None else f"{value} ±{error:{format}}"
