"""Verifies that an artifact is intact and sound, and that its folder holds no other files."""

import os
import re
from pathlib import Path

from rotationzoo.artifact.layout import rotations_from, statistics_from
from rotationzoo.artifact.manifest import ROTATIONS, STATISTICS, hash_config
from rotationzoo.artifact.store import CARD, MANIFEST, SIGNATURE, Artifact
from rotationzoo.calibration.soundness import Verification, check
from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import find, has_weights, weights_fingerprint
from rotationzoo.recipe import digest
from rotationzoo.storage import files
from rotationzoo.storage.folders import read_settled


def verify(
    artifact: Artifact, model: str | None = None, revision: str | None = None
) -> Verification:
    """Check everything again, and with `model` that the artifact was made for it. Raises
    `RotationZooError` only if the check cannot be made, for example if there is no such model."""
    problems = artifact.damaged_files()
    checked = [] if problems else ["checksums"]
    # After the checksums, so that changed files come first.
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
        # A checksum may already have reported unreadable content.
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
    """Check the names, dtypes and shapes of all tensors and, if they are right, their content."""
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
    """Compare the config and any local weights. Returns problems and what was compared."""
    expected, source = artifact.manifest.model, find(model, revision)
    fingerprint, compared, problems = expected.weights_fingerprint, f"the config of {model}", []
    if hash_config(source.folder) != expected.config_sha256:
        problems = [f"made for another model or config than that of {model}: {expected.id}"]
    elif fingerprint and has_weights(source):
        compared = f"the weights of {model}"
        if weights_fingerprint(source) != fingerprint:
            problems = [f"made for other weights than {model} has: {expected.id}"]
    else:
        if fingerprint:
            compared += ", whose weights are not on this machine"
        # Without local weights, the revision still identifies them.
        if expected.revision and source.revision not in (None, expected.revision):
            made_for = f"made for revision {expected.revision}"
            problems = [f"{made_for}, and {model} is at {source.revision}"]
    return problems, compared


# ---- entries that the manifest does not list

# What hubs' clients and the Finder leave in a folder, and no engine reads. Earlier clients of
# ModelScope also leave pickles, which they load: these are refused.
_LEFT_BEHIND = re.compile(
    r"\.gitattributes|\.DS_Store|\.mv"
    r"|\.cache/huggingface/(\.gitignore(\.lock)?|CACHEDIR\.TAG|trees/[0-9a-f]{40}\.json)"
    r"|\.cache/huggingface/download/[^/]+\.(metadata|lock|incomplete)"
)
_LEFT_FOLDERS = ".cache", "._____temp"


def unlisted_files(artifact: Artifact) -> list[str]:
    """One sentence for each entry that is neither in the manifest nor left by a hub's client."""
    folder, problems = artifact.folder, []
    for name in read_settled(folder, lambda: sorted(os.listdir(folder))):
        if name in artifact.manifest.files:
            continue
        path = folder / name
        if name not in (MANIFEST, CARD, SIGNATURE):
            if foreign := _foreign_file(folder, name):
                problem = "is not in the manifest: whoever made the artifact did not write it"
                problems.append(f"{foreign} {problem}")
        elif path.is_symlink() or not path.is_file():
            problems.append(f"{name} is not a file")
    return problems


def _foreign_file(folder: Path, name: str) -> str | None:
    """The first file of an entry that no hub client leaves in a folder, or None."""
    top = folder / name
    if top.is_symlink() or not top.is_dir():
        return None if _is_left_behind(folder, top) else name
    if name not in _LEFT_FOLDERS:
        return name
    unreadable: list[OSError] = []
    for parent, inner, names in os.walk(top, onerror=unreadable.append):
        # Links to folders are listed as folders, and are not followed.
        links = [each for each in inner if Path(parent, each).is_symlink()]
        for path in (Path(parent, each) for each in (*links, *names)):
            if not _is_left_behind(folder, path):
                return path.relative_to(folder).as_posix()
    return name if unreadable else None


def _is_left_behind(folder: Path, path: Path) -> bool:
    """Whether it is a file that a hub's client leaves."""
    if not _LEFT_BEHIND.fullmatch(path.relative_to(folder).as_posix()):
        return False
    try:
        return files.size_of(path) is not None
    except RotationZooError:
        return False
