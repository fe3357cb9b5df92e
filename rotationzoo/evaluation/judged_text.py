"""The text that an evaluation judges on: which one it is, and how long it must be."""

from transformers import PretrainedConfig

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model.rope import longer_rows_hint, position_count
from rotationzoo.recipe import Data
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.words import counted


def judged_text(data: Data) -> Data:
    """The text to evaluate on. For `bundled` this is the held-out text, not the one that artifacts
    are calibrated on by default."""
    if data.source == "bundled":
        return data.model_copy(update={"source": str(HELD_OUT)})
    return data


def check_positions(length: int, config: PretrainedConfig) -> None:
    """Raise `RotationZooError` for texts of more tokens than the model has positions."""
    positions = position_count(config)
    if positions is not None and length > positions:
        raise RotationZooError(
            f"texts of {length} tokens are longer than the {positions} positions of the model",
            hint=longer_rows_hint(config, length, f"add: --length {positions}"),
        )


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
    # With fewer tokens than one row there is no row at all. Only with `document` packing is every
    # document a row, whatever its length.
    if data.packing != "document" and not data.row_lengths:
        raise UsageError(
            f"{counted(data.tokens, 'token')} cannot fill one text of {data.length:,}",
            hint="more --tokens, or a shorter --length",
        )
