"""Verification that an artifact is intact and sound: its checksums, geometry, orthogonality and
statistics."""

from rotationzoo.artifact.layout import rotations_from
from rotationzoo.artifact.leftovers import unlisted_files
from rotationzoo.artifact.manifest import ROTATIONS, STATISTICS, hash_config
from rotationzoo.artifact.statistics_layout import statistics_from
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.soundness import Verification, check
from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import find, has_weights, weights_fingerprint
from rotationzoo.recipe import digest


def verify(
    artifact: Artifact, model: str | None = None, revision: str | None = None
) -> Verification:
    """Recompute everything that can be recomputed. With `model`, also check that the artifact was
    made for it.

    Raises `RotationZooError` only if the check itself cannot be made, for example because the model
    cannot be found. Problems of the artifact are returned.
    """
    problems = artifact.damaged_files()
    checked = [] if problems else ["checksums"]
    # After the checksums, so that a file that was changed comes first.
    problems += unlisted_files(artifact)
    error = None
    try:
        if digest(artifact.manifest.recipe) != artifact.manifest.recipe_sha256:
            problems.append(
                "the recipe in the manifest is not the one that was used: its sha256 differs"
            )
        tensors = _check_tensors(artifact)
        problems += tensors.problems
        error = tensors.orthogonality_error
        checked += tensors.checked
    except RotationZooError as damage:
        # Unreadable content is a problem of the artifact; its checksum may have reported it
        # already.
        if str(damage) not in problems:
            problems.append(str(damage))
    verification = Verification(problems, error, checked)
    if model is not None:
        misfits, compared = _check_model(artifact, model, revision)
        verification = verification.with_misfits(misfits)
        if not misfits:
            checked.append(compared)
    return verification


def _check_tensors(artifact: Artifact) -> Verification:
    """Check the names, dtypes and shapes of all tensors, then their content.

    If the first do not match the recipe and the geometry, no tensor is read.
    """
    rotations, problems = artifact.examine(ROTATIONS)
    statistics = None
    if STATISTICS in artifact.manifest.files:
        statistics, statistics_problems = artifact.examine(STATISTICS)
        problems += statistics_problems
    if problems:
        return Verification(problems, None, ["geometry", "finiteness"])
    averages = None if statistics is None else statistics_from(statistics)
    return check(rotations_from(rotations), averages, artifact.content)


def _check_model(artifact: Artifact, model: str, revision: str | None) -> tuple[list[str], str]:
    """Compare the config and, if the model's weights are on this machine, their fingerprint.

    Returns the problems and a phrase that says what was compared.
    """
    expected = artifact.manifest.model
    source = find(model, revision)
    compared = f"the config of {model}"
    if not artifact.bound:
        problem = "bound to no model: it is not known which one the imported files are for"
        return [problem], compared
    if hash_config(source.folder) != expected.config_sha256:
        problem = f"made for another model or config than that of {model}: {expected.id}"
        return [problem], compared
    fingerprint = expected.weights_fingerprint
    if fingerprint and has_weights(source):
        compared = f"the weights of {model}"
        if weights_fingerprint(source) != fingerprint:
            return [f"made for other weights than {model} has: {expected.id}"], compared
        return [], compared
    if fingerprint:
        compared += ", whose weights are not on this machine"
    # Without weights to compare, the revision still identifies them.
    if expected.revision and source.revision and source.revision != expected.revision:
        problem = f"made for revision {expected.revision}, and {model} is at {source.revision}"
        return [problem], compared
    return [], compared
