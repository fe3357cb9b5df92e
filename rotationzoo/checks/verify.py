"""Is an artifact what it says it is: the bytes that were written, orthogonal, of this geometry,
from these statistics?"""

from rotationzoo.artifact.layout import rotations_from, statistics_from
from rotationzoo.artifact.manifest import ROTATIONS, STATISTICS
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.soundness import Verification, check
from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import config_hash, find, has_weights, weights_fingerprint
from rotationzoo.recipe import digest


def verify(
    artifact: Artifact, model: str | None = None, revision: str | None = None
) -> Verification:
    """Recompute everything that can be recomputed; with `model`, also whether the artifact was made
    for it.

    Raises `RotationZooError` only where the check itself cannot be made, such as a model that
    cannot be found.
    """
    problems = artifact.damaged_files()
    checked = [] if problems else ["checksums"]
    error = None
    try:
        if digest(artifact.manifest.recipe) != artifact.manifest.recipe_sha256:
            problems.append(
                "the recipe in the manifest is not the one that was used: its sha256 differs"
            )
        sound = _check_files(artifact)
        problems += sound.problems
        error = sound.orthogonality_error
        checked += sound.checked
    except RotationZooError as damage:
        problems += [str(damage)] if str(damage) not in problems else []
    if model is not None:
        found, what = _model_problems(artifact, model, revision)
        problems += found
        checked += [] if found else [what]
    return Verification(problems, error, checked)


def _check_files(artifact: Artifact) -> Verification:
    """The tensors, of which none is read where names, types or shapes are not those of recipe and
    geometry."""
    rotations, problems = artifact.examine(ROTATIONS)
    statistics = None
    if STATISTICS in artifact.manifest.files:
        statistics, others = artifact.examine(STATISTICS)
        problems += others
    if problems:
        return Verification(problems, None, ["geometry", "finiteness"])
    averages = None if statistics is None else statistics_from(statistics)
    return check(rotations_from(rotations), averages, artifact.content)


def _model_problems(artifact: Artifact, model: str, revision: str | None) -> tuple[list[str], str]:
    """Compare the config and, where the weights are on this machine, their fingerprint; a sentence
    says which."""
    theirs = artifact.manifest.model
    source = find(model, revision)
    if not artifact.bound:
        return [
            "bound to no model: nobody has said which one the imported files are for"
        ], f"the config of {model}"
    if config_hash(source) != theirs.config_sha256:
        return [
            f"made for another model or config than that of {model}: {theirs.id}"
        ], f"the config of {model}"
    fingerprint = theirs.weights_fingerprint
    if fingerprint and has_weights(source):
        if weights_fingerprint(source) == fingerprint:
            return [], f"the weights of {model}"
        return [
            f"made for other weights than those of {model}: {theirs.id}"
        ], f"the weights of {model}"
    what = f"the config of {model}" + (
        ", whose weights are not on this machine" if fingerprint else ""
    )
    if theirs.revision and source.revision and source.revision != theirs.revision:
        return [f"made for revision {theirs.revision}, and {model} is at {source.revision}"], what
    return [], what
