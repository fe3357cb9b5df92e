"""The codec of a rotated cache: from keys and values of a model to packed codes, and back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from rotationzoo.codec import cuda_encoder, int2
from rotationzoo.codec.attention import PackedSide
from rotationzoo.codec.cuda import Variant
from rotationzoo.codec.cuda_encoder import Encoder
from rotationzoo.codec.cuda_segments import SegmentEncoder, make_encoder
from rotationzoo.codec.options import Rounding
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.errors import RotationZooError
from rotationzoo.rotations import LayerRotations, Rotation, Rotations

_HINT = "give the rotations of this model"


@dataclass(frozen=True)
class RotatedCodec:
    """Rotations, and how rows get their codes.

    A simulation reads whole rows through `fake_quantize`. A cache takes the same steps one by one:
    `pack` when a token leaves the exact window, and `restore` when it is read. Raises
    `RotationZooError` for transform coding with rotations that lack its matrices.
    """

    rotations: Rotations
    group_size: int | None = None
    """Channels that share a scale; None is the whole head."""
    rounding: Rounding = "nearest"
    """How rows get codes: the nearest of each channel, as in engines, or by transform coding."""
    _encoders: dict[tuple[int, str, int2.Format, torch.device], Encoder | SegmentEncoder | None] = (
        field(init=False, default_factory=dict, repr=False, compare=False)
    )
    _matrices: dict[tuple[int, str, str], torch.Tensor] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.rounding == "transform" and not self.rotations.has_transform:
            problem = "the rotations have no matrices for transform coding"
            hint = "calibrate with --recipe transform"
            raise RotationZooError(problem, hint)

    @property
    def token_group(self) -> int:
        return 1  # each token has its own scales

    def stored_bits(self, layer: int, side: str, dim: int, format: int2.Format) -> float:
        if self.rounding == "transform":
            layout = self.segments(layer, side)
            return 8 * sum(layout.row_bytes) / (layout.heads * dim)
        return int2.bits_per_element(dim, self.group_size, format)

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Keys or values `[B, H, T, D]` of a layer as the exact windows store them: keys without
        their mean, which no server adds back, because a softmax over keys ignores it."""
        mean = self._mean(rows, layer, side)
        if mean is None or side != "key":
            return rows
        return (rows.float() - mean).to(rows.dtype)

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        """Rows `[B, H, T, D]` as the 2-bit cache returns them, in the model's frame and dtype:
        centered keys without their mean, and centered values with it."""
        rotated = self.rotate(rows, layer, side)
        if self.rounding == "transform":
            int2.check_values(rotated)
            layout = self.segments(layer, side)
            stored = layout.levels(*layout.quantize(rotated.float(), self.steps(layer, side)))
        else:
            quantized = self.quantize(rotated, layer, side, format)
            stored = int2.dequantize(quantized, format)
        return self.restore(stored, layer, side).to(rows.dtype)

    def rotate(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Rows `[B, H, T, D]` without their mean, rotated, in the type of the rotation."""
        mean = self._mean(rows, layer, side)
        matrix = self.forward(layer, side).to(rows.device)
        rows = rows.to(matrix.dtype)
        return (rows if mean is None else rows - mean) @ matrix

    def quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> int2.Quantized:
        """Nearest codes of rotated rows `[B, H, T, D]`, with scales and offsets `[B, H, T, G]`."""
        ratio = self.rotations[layer][side].clip[..., None]
        return int2.quantize(rows, ratio, self.group_size, format)

    def pack(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> Sequence[torch.Tensor]:
        """The sections `[B, H or 1, T, ...]` of the model's rows `[B, H, T, D]`. With a kernel
        nothing waits for the GPU, and `encoder` reports rows that cannot be quantized."""
        rotated = self.rotate(rows, layer, side)
        if encoder := self.encoder(layer, side, format, rows.device):
            return encoder(rotated)
        int2.check_values(rotated)
        return self.encode(rotated, layer, side, format)[0]

    def encode(
        self, rotated: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """The sections of rotated rows `[B, H, T, D]`, by the definition, and which rows are not
        finite or too large, `[B, H, T]`: these read back as NaN."""
        is_bad = int2.find_refused(rotated)
        if self.rounding == "transform":
            layout, steps = self.segments(layer, side), self.steps(layer, side)
            return layout.pack(*layout.quantize(rotated.float(), steps)), is_bad
        good = rotated.masked_fill(is_bad[..., None], 0)
        quantized = self.quantize(good, layer, side, format)
        codes = int2.pack(quantized.codes, format)
        scale = quantized.scale.masked_fill(is_bad[..., None], torch.nan)
        return int2.Quantized(codes, scale, quantized.offset), is_bad

    def encoder(
        self, layer: int, side: str, format: int2.Format, device: torch.device
    ) -> Encoder | SegmentEncoder | None:
        """The kernel that computes `encode`; None if this device has none."""
        place, rotation = (layer, side, format, device), self.rotations[layer][side]
        if place in self._encoders:
            return self._encoders[place]
        made: Encoder | SegmentEncoder | None = None
        if self.rounding == "transform":
            made = make_encoder(self.segments(layer, side), self.steps(layer, side).to(device))
        else:
            group = self.group_size or rotation.dim
            variant = Variant(rotation.dim, group, torch.float32, format)
            if cuda_encoder.supports(variant) and cuda_encoder.kernels_run_on(device):
                made = cuda_encoder.clip_encoder(rotation.clip, variant, device)
        self._encoders[place] = made
        return made

    def page_layout(
        self, layer: int, side: str, tokens: int, format: int2.Format
    ) -> PageLayout | SegmentLayout:
        """The layout of a page of `tokens` tokens."""
        if self.rounding == "transform":
            return self.segments(layer, side, tokens)
        rotation = self.rotations[layer][side]
        groups = rotation.dim // (self.group_size or rotation.dim)
        return PageLayout(len(rotation.clip), rotation.dim, groups, tokens, format)

    def segments(self, layer: int, side: str, tokens: int = 1) -> SegmentLayout:
        """The layout of a page with transform coding."""
        widths = self.rotations[layer][side].widths
        assert widths is not None
        return SegmentLayout.of(widths, tokens)

    def packed_side(
        self,
        layer: int,
        side: str,
        layout: PageLayout | SegmentLayout,
        blocks: Sequence[torch.Tensor],
    ) -> PackedSide:
        """Pages of packed rows as attention reads them."""
        mean = self.rotations[layer][side].mean
        return PackedSide(blocks, layout, self.inverse(layer, side), mean)

    def restore(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        """Rotated rows `[B, H, T, D]` in the model's frame: keys without mean, others with it."""
        matrix = self.inverse(layer, side).to(rows.device)
        restored = rows.to(matrix.dtype) @ matrix
        mean = self._mean(rows, layer, side)
        return restored if mean is None or side == "key" else restored.add_(mean)

    def forward(self, layer: int, side: str) -> torch.Tensor:
        """The matrices `[H, D, D]` that multiply rows without their mean."""
        return self._made(layer, side, "to_steps")

    def inverse(self, layer: int, side: str) -> torch.Tensor:
        """The matrices `[H, D, D]` that take dequantized rows to the model's frame."""
        return self._made(layer, side, "from_steps")

    def steps(self, layer: int, side: str) -> torch.Tensor:
        """The steps `[H, D]` of transform coding."""
        return self._made(layer, side, "steps")

    def _made(self, layer: int, side: str, name: str) -> torch.Tensor:
        """A tensor that is made once, and contiguous for kernels."""
        if (layer, side, name) not in self._matrices:
            rotation = self.rotations[layer][side]
            if name == "steps" or self.rounding == "transform":
                made: torch.Tensor = getattr(rotation, name)
            else:
                matrix = rotation.matrix if name == "to_steps" else rotation.matrix.mT
                made = matrix.expand(len(rotation.clip), -1, -1)
            self._matrices[layer, side, name] = made.contiguous()
        return self._matrices[layer, side, name]

    def for_layer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Self:
        """The same codec with the rotations of one layer, on the device of its keys and values
        `[B, H, T, D]`. Raises `RotationZooError` if they are for other heads or dimensions."""
        if layer not in self.rotations:
            raise RotationZooError(f"there is no rotation for layer {layer}", hint=_HINT)
        rotations = self.rotations[layer]
        # With a single side, the second tensor holds rows that stay exact.
        stored = zip(rotations.sides, (key, value), strict=False)
        for rotation, rows in ((rotations[side], rows) for side, rows in stored):
            heads, dim = rows.shape[1], rows.shape[3]
            if (len(rotation.clip), rotation.dim) != (heads, dim):
                found = f"layer {layer} has {heads} KV heads of {dim} channels"
                made_for = f"its rotations are for {len(rotation.clip)} of {rotation.dim}"
                raise RotationZooError(f"{found}, and {made_for}", _HINT)
        moved = {side: _move(rotations[side], key.device) for side in rotations.sides}
        return replace(self, rotations=Rotations({layer: LayerRotations.of_sides(moved)}))

    def _mean(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor | None:
        """The mean `[H, 1, D]` on the device of the rows; None if the side is not centered."""
        mean = self.rotations[layer][side].mean
        return None if mean is None else mean.to(rows.device)[:, None]


def _move(rotation: Rotation, device: torch.device) -> Rotation:
    """A rotation on a device. Clip ratios stay on the CPU, which looks up their positions."""
    moved: dict[str, torch.Tensor] = {}
    for name in ("matrix", "mean", "transform", "deviations"):
        if (tensor := getattr(rotation, name)) is not None:
            moved[name] = tensor.to(device)
    return replace(rotation, **moved)
