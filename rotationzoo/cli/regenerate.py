"""`rotationzoo regenerate`: make and publish new rotations for models that have changed."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotationzoo.cli.list import place_options
from rotationzoo.cli.next_steps import shell_line, typed_words
from rotationzoo.cli.output import Output, say, table
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.cli.push import NONE, choose_signer, publish
from rotationzoo.errors import PartlyDone, RotationZooError, UsageError
from rotationzoo.settings import (
    CalibrationSettings,
    EvaluationSettings,
    IndexPlace,
    Lengths,
    OutputFolder,
    RunSettings,
    Signing,
    Tasks,
    TextLength,
    ZooRepo,
)
from rotationzoo.settings_base import argument, flag, option
from rotationzoo.storage.folders import follow_link
from rotationzoo.words import UNKNOWN, counted
from rotationzoo.zoo.hubs.protocol import DEFAULT_HUB, HubOrBoth, chosen_hubs

if TYPE_CHECKING:
    from rotationzoo.zoo.hubs.protocol import Published
    from rotationzoo.zoo.regenerate import DueModel


def regenerate_command(
    signing: Signing,
    run: RunSettings,
    out: Output,
    model: str | None = argument("A hub id or folder, as in a recipe; none with --plan.", None),
    plan: bool = flag("Only list what is due."),
    configs: Path = option("Folder of recipe files, or one.", default=Path("configs")),
    output: OutputFolder = None,
    data: str = option("Text to evaluate on.", default="bundled"),
    tokens: int = option("Tokens to evaluate on.", min=1, default=16384),
    length: TextLength = None,
    tasks: Tasks = None,
    lengths: Lengths = None,
    questions: int = option("Questions per task and length.", min=1, default=64),
    batch: int | None = option("Rows per forward pass.", min=1),
    to: HubOrBoth | None = option("Publish to this hub."),
    index: IndexPlace = None,
    repo: ZooRepo = None,
) -> None:
    """Make and publish new rotations where a model, or its recipe, has changed.

    rotationzoo regenerate --plan --json

    rotationzoo regenerate Qwen/Qwen3-8B --to huggingface --repo my-org/rotationzoo
    """
    # Long before it is needed, so that a wrong key stops the command at once.
    signer = choose_signer(signing if to else replace(signing, sign=NONE))
    from rotationzoo.zoo.lookup import ZOO, find_index, read_index
    from rotationzoo.zoo.regenerate import find_due, find_recipe_file

    if model is None and not plan:
        raise UsageError("name a model, or list what is due", hint="rotationzoo regenerate --plan")
    recipe_file = find_recipe_file(configs, model)
    zoo = repo or ZOO
    if index is not None:
        zoo_index = find_index(index, zoo)
    else:  # of one hub, even if rotations are published on both
        hub = chosen_hubs(to or DEFAULT_HUB, repo)[0]
        zoo_index = read_index(zoo, hub, must_exist=False)
    out.note(f"Read {zoo_index.origin}")
    if plan or model is None:
        models, unknown = find_due(configs, zoo_index.content)
        show_due(out, models, unknown)
        if unknown:
            out.notes(f"{name} was skipped: {error}" for name, error in unknown.items())
            problem = f"{counted(len(unknown), 'model')} could not be checked"
            raise PartlyDone(problem, next(iter(unknown.values())).hint)
        name, *typed = typed_words("--plan", str(model))
        listing = ["list", *place_options(index, repo, zoo_index)]
        out.suggest(*([name, models[0].model, *typed] if models else listing))
        return
    from rotationzoo.api import calibration_job, evaluation_job
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.cli.report import add_report
    from rotationzoo.zoo.regenerate import regenerate

    asked = CalibrationSettings(
        model,
        recipe=str(recipe_file),
        output=follow_link(output),
        batch=batch,
        **run.run_options,
    )
    judged = EvaluationSettings(
        model,
        data=data,
        tokens=tokens,
        length=length,
        tasks=tasks,
        lengths=lengths,
        questions=questions,
    )
    job, evaluation = calibration_job(asked), evaluation_job(judged)
    publishing = ["push", str(job.output), repo or "OWNER/REPO", *signing.words]
    publishing += ["--create-pr", "--to", str(to)] if to else []
    with show_progress(out) as progress:
        verdict = regenerate(job, zoo_index, evaluation, progress, shell_line(*publishing))
    artifact = add_report(out, Artifact.open(job.output))
    places: dict[str, Published] = {}
    if to is not None:
        from rotationzoo.zoo.push import Destination, prepare_upload

        upload = prepare_upload(artifact, zoo)
        # As a pull request, so that a person decides whether to merge it.
        destination = Destination(zoo, chosen_hubs(to, repo), create_pr=True)
        _, places = publish(out, artifact, upload, destination, signer, signing)
    _show_verdict(out, job.output, verdict, places)
    listing = ["list", *place_options(None, zoo, zoo_index)]
    out.suggest(*(listing if places else publishing))


def show_due(out: Output, models: list["DueModel"], unknown: dict[str, RotationZooError]) -> None:
    """Print the models that are due. `unknown`: model -> why its state is unknown."""
    reasons = {name: str(error) for name, error in unknown.items()}
    data = {"models": [asdict(due) for due in models], "unknown": reasons}
    columns, rows = ["model", "revision", "was", "reason"], list[list[str]]()
    for due in models:
        revisions = [(each or UNKNOWN)[:12] for each in (due.revision, due.was)]
        rows.append([due.model, *revisions, due.reason])
    names, title = "\n".join(row[0] for row in rows), f"{len(models)} due"
    out.result(data, names, lambda: table(title, columns, rows, folded=["reason"]))


def _show_verdict(
    out: Output, folder: Path, verdict: dict[str, Any], places: dict[str, "Published"]
) -> None:
    device = verdict["validated_on"]
    validation = f"validated on {device}" if device else "not validated, without a GPU"
    lines = [f"{folder}, {validation}"]
    if verdict["compared_with"]:
        if answers := verdict["answers"]:
            new, old = answers["answered"], answers["other_answered"]
            asked = counted(answers["questions"], "question")
            lines.append(f"{new} of {asked} answered, by the published {old}")
        difference, error = verdict["log_perplexity_difference"], verdict["standard_error"] or 0
        change = f"log perplexity {difference:+.4f} ±{error:.4f}"
        lines.append(f"{change} compared with the published rotations")
    lines += [f"{name}: {place.url}" for name, place in places.items()]
    hubs = {name: asdict(place) for name, place in places.items()}
    out.result({**verdict, "hubs": hubs}, str(folder), lambda: say(*lines))
