"""One arm of a comparison: rotations under test, and what a 2-bit cache that uses them returns."""

from dataclasses import dataclass
from typing import Literal

import torch

from rotationzoo.codec import feedback, int2
from rotationzoo.errors import RotationZooError
from rotationzoo.rotations import Rotations


@dataclass(frozen=True)
class Arm:
    """Rotations under test, with a name and a group size (None: the whole head).

    Raises `RotationZooError` for `feedback` with rotations that lack its factors.
    """

    name: str
    rotations: Rotations
    group_size: int | None = None
    rounding: Literal["nearest", "feedback"] = "nearest"
    """How keys get their codes: each channel the nearest one, as engines write today, or together
    by error feedback (`codec.feedback`). Both are stored in the same bytes. Values always get the
    nearest codes."""

    def __post_init__(self) -> None:
        if self.rounding == "feedback" and not self.rotations.has_feedback:
            raise RotationZooError(
                f"{self.name} has no factors to choose key codes by error feedback with",
                hint="calibrate with --feedback",
            )

    @property
    def token_group(self) -> int:
        """Tokens that are quantized together: each token has scales of its own."""
        return 1

    def stored_bits(self, side: str, dim: int, format: int2.Format) -> float:
        """Bits per quantized element of a side, with its share of the scales."""
        return int2.bits_per_element(dim, self.group_size, format)

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` of a layer as the exact windows store them.

        Centred keys lose their mean here too. No server adds it back, because a softmax over keys
        ignores it.
        """
        mean = self._mean(rows, layer, side)
        # Values come back with their mean, so exact values stay as they are.
        if mean is None or side == "value":
            return rows
        return (rows.float() - mean).to(rows.dtype)

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        """Rows `[B, H, T, D]` as the 2-bit cache returns them, in their original frame and dtype.

        Centred keys come back without their mean. Centred values come back with it, because a
        server adds it to the attention output.
        """
        rotation = self.rotations[layer][side]
        mean = self._mean(rows, layer, side)
        centered = rows.float() if mean is None else rows.float() - mean
        transform, inverse = (
            matrix.to(rows.device) for matrix in (rotation.transform, rotation.inverse)
        )
        restored = self.store(centered @ transform, layer, side, format) @ inverse
        if mean is not None and side == "value":
            restored = restored + mean
        return restored.to(rows.dtype)

    def store(self, rows: torch.Tensor, layer: int, side: str, format: int2.Format) -> torch.Tensor:
        """Rotated rows `[B, H, T, D]` as a reader gets them back, still rotated."""
        rotation = self.rotations[layer][side]
        if self.rounding == "feedback" and rotation.feedback is not None:
            factor = rotation.feedback.to(rows.device)
            return feedback.round_trip(rows, factor, self.group_size, format)
        return int2.round_trip(rows, rotation.clip[..., None], self.group_size, format)

    def _mean(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor | None:
        """The mean `[H, 1, D]` on the device of the rows, or None where this side is not
        centred."""
        mean = self.rotations[layer][side].mean
        return None if mean is None else mean.to(rows.device)[:, None]


def fake_quantize(
    rows: torch.Tensor,
    matrix: torch.Tensor,
    clip: torch.Tensor,
    group_size: int | None,
    format: int2.Format,
    inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate rows, store them in 2 bits, restore them and rotate them back.

    * `rows`: `[B, H, T, D]`, with their mean already subtracted if they are centred;
    * `matrix`: `[H, D, D]` or `[B, H, D, D]`, on any device;
    * `clip`: clip ratios, `[H]` or `[B, H]`;
    * `group_size`: channels that share a scale; None means the whole head;
    * `format`: how an engine stores codes and scales;
    * `inverse`: the inverse of `matrix`; None means its transpose.
    """
    matrix = matrix.to(rows.device)
    inverse = matrix.mT if inverse is None else inverse.to(rows.device)
    return int2.round_trip(rows @ matrix, clip[..., None], group_size, format) @ inverse
