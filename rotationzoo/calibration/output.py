"""The output folder of a calibration: whether it is writable, replaceable, or already finished."""

import shutil

from rotationzoo.artifact.store import MANIFEST, Artifact
from rotationzoo.calibration.identity import Identity, differences
from rotationzoo.calibration.plan import Job, Plan
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import folders
from rotationzoo.storage.files import disk_errors
from rotationzoo.writer import check_replaceable


def check_output(job: Job) -> None:
    """Raise `RotationZooError` unless the output can be written and whatever is there may be
    replaced."""
    with disk_errors(job.output):
        folders.recover(job.output)
        check_replaceable(job.output)
        if _holds_artifact(job):
            _check_recipe_of(job, Artifact.open(job.output))
    folders.check_writable(job.output)


def check_room(known: Plan) -> None:
    """Raise `RotationZooError` if the disk has no room for the artifact and a checkpoint of the
    same size."""
    output = known.job.output
    free = shutil.disk_usage(folders.existing_parent(output)).free
    needed = 2 * known.artifact_bytes
    if free < needed:
        raise RotationZooError(
            f"the disk of {output} has {free / 1e6:,.0f} MB free "
            f"and {needed / 1e6:,.0f} MB are needed",
            hint="make room, or choose another place with --output",
        )


def finished_artifact(job: Job, identity: Identity) -> Artifact | None:
    """The finished artifact of this same job, or None if it is missing, damaged or about to be
    replaced.

    Raises `RotationZooError` if the folder holds the artifact of another job.
    """
    if job.restart or job.unfinished or not _holds_artifact(job):
        return None
    artifact = Artifact.open(job.output)
    saved = {**artifact.manifest.identity, "recipe": _asked_recipe(artifact)}
    if changed := differences(saved, identity):
        raise RotationZooError(
            f"{job.output} holds the work of another job: {', '.join(changed)} differ",
            hint="choose another place with --output, or replace it with --restart",
        )
    return None if artifact.damaged_files() else artifact


def _holds_artifact(job: Job) -> bool:
    return (job.output / MANIFEST).is_file()


def _check_recipe_of(job: Job, artifact: Artifact) -> None:
    """Refuse to replace the artifact of another recipe, unless the user asks for it with
    `--restart`, or did so for the unfinished run that is being resumed."""
    if job.restart or job.unfinished:
        return
    if _asked_recipe(artifact) != job.recipe.hash:
        existing = f"{artifact.recipe.name} for {artifact.manifest.model.id}"
        if artifact.recipe.name == job.recipe.name and (changed := _changed_text(job, artifact)):
            existing += f", with other {', '.join(changed)}"
        raise RotationZooError(
            f"{job.output} holds the work of another recipe ({existing})",
            hint="choose another place with --output, or replace it with --restart",
        )


def _changed_text(job: Job, artifact: Artifact) -> list[str]:
    """The settings of the text, such as `tokens`, in which a job differs from an artifact."""
    saved, asked = artifact.manifest.recipe["data"], job.recipe.published()["data"]
    return [key for key, value in asked.items() if saved[key] != value]


def _asked_recipe(artifact: Artifact) -> str:
    """The hash of the recipe that the user asked for.

    It differs from the hash of the recipe that was followed if only the weights showed that keys
    cannot be centered.
    """
    manifest = artifact.manifest
    return str(manifest.identity.get("recipe", manifest.recipe_sha256))
