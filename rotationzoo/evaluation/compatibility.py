"""Checks that artifacts and texts fit the evaluated model, and notes for the
report on what fits with reservations."""

from collections.abc import Collection, Sequence

from transformers import PretrainedConfig

from rotationzoo.artifact.store import Artifact
from rotationzoo.codec.formats import Format
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.geometry import Geometry, shift_reason, shifted_layers
from rotationzoo.model.compatibility import other_weights_note
from rotationzoo.model.source import Source
from rotationzoo.recipe import Data
from rotationzoo.recipe.rope import position_count
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import Corpus
from rotationzoo.words import counted


def notes_for_reader(
    text: Corpus, source: Source, artifacts: list[Artifact], geometry: Geometry
) -> list[str]:
    """Notes that qualify the figures: on text that fell short, and artifacts that were made for
    other weights, were calibrated on this very text, or center keys although this model's attention
    does not allow it."""
    notes = [text.note] if text.note else []
    for artifact in artifacts:
        name = artifact.folder.resolve().name
        if note := other_weights_note(artifact, source):
            notes.append(note)
        calibration = artifact.manifest.calibration
        if calibration is not None and calibration.fingerprint == text.fingerprint:
            notes.append(f"{name} was calibrated on this very text")
        if artifact.recipe.center_keys and (layers := shifted_layers(geometry)):
            reason = shift_reason(layers)
            notes.append(f"{name} centers keys, which changes what this model computes: {reason}")
    return notes


_FAR = 34
"""How many ranges from zero a row's minimum may lie: float16 rounds it by 1/2048 of itself, which
is then a tenth of half a step of 2 bits, a sixth of the range."""


def float16_notes(
    artifacts: Sequence[Artifact], format: Format, uncentered: Collection[str]
) -> list[str]:
    """Notes on artifacts whose keys or values keep a mean so far from zero that a float16 minimum
    blurs it, by the means and variances of their rotated channels."""
    if format.metadata != "float16" or format.offset == "none":
        return []
    notes = []
    for artifact in artifacts:
        statistics = artifact.statistics or {}
        for layer, side, rotation in artifact.rotations.each():
            moment = statistics.get(layer, {}).get(side)
            keeps_mean = rotation.mean is None or side in uncentered
            if moment is None or moment.mean is None or not keeps_mean:
                continue
            matrix = rotation.matrix.double()
            mean = (moment.mean[:, None] @ matrix)[:, 0]
            square = (matrix.mT @ moment.second_moment @ matrix).diagonal(dim1=-2, dim2=-1)
            spread = 2 * (square - mean.square()).clamp(min=0).sqrt()
            least, most = (mean - spread).amin(-1), (mean + spread).amax(-1)
            if (far := (least.abs() / (most - least)).max().item()) > _FAR:
                notes.append(
                    f"{artifact.folder.resolve().name}: {side}s of layer {layer} lie {far:,.0f} "
                    "times their range from zero, too far for scales in float16: --format sglang"
                )
    return notes


# ---- the text that is judged on


def judged_text(data: Data) -> Data:
    """The text to evaluate on. For `bundled` this is the held-out text, not the one that artifacts
    are calibrated on by default."""
    if data.source == "bundled":
        return data.model_copy(update={"source": str(HELD_OUT)})
    return data


def fit_rows(data: Data, start: int, config: PretrainedConfig) -> Data:
    """Double the length of the rows until a quarter of each lies past `start`, the first position
    that is measured, and cut it to the positions that the model has."""
    length = data.length
    while 3 * length < 4 * start:
        length *= 2
    return data.model_copy(update={"length": min(length, position_count(config) or length)})


def check_length(data: Data, start: int) -> None:
    """Raise `RotationZooError` for texts that end before `start`, the first position that is
    measured, and `UsageError` for fewer tokens than one text."""
    if data.length < start + 2:
        raise RotationZooError(
            f"texts of {data.length} tokens are too short: "
            f"the first that reads a quantized one is at position {start}",
            hint="give longer rows with --length, or smaller ones with --windows",
        )
    if not data.rows:
        problem = f"{counted(data.tokens, 'token')} cannot fill one text of {data.length:,}"
        hint = "more --tokens, or a shorter --length"
        raise UsageError(problem, hint)
