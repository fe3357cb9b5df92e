"""The 2-bit codec of one layer's cache, at a recipe's means and clip ratios."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from rotationzoo.cache.arm import fake_quantize
from rotationzoo.calibration.search.learn import Codec
from rotationzoo.calibration.search.query_samples import QuerySample
from rotationzoo.calibration.search.straight_through import straight_through
from rotationzoo.codec import int2
from rotationzoo.linalg.moments import Moment
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import SIDES


@dataclass(frozen=True)
class LayerCodec:
    """Everything about the codec of one layer's cache but the rotation, which is what the search
    varies."""

    means: Mapping[str, torch.Tensor]
    """Side -> the mean `[H, D]`, float32, that is subtracted; zeros if the recipe does not centre
    that side."""
    clips: Mapping[str, float]
    """Side -> the recipe's clip ratio."""
    group_size: int | None
    format: int2.Format

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, moments: Mapping[str, Moment], device: torch.device
    ) -> "LayerCodec":
        """The codec of a recipe that has a search, with its means on `device`."""
        assert recipe.search is not None
        means = {}
        for side in SIDES:
            mean = moments[side].mean.float().to(device)
            means[side] = mean if side in recipe.centered else torch.zeros_like(mean)
        clips = {"key": recipe.key_clip, "value": recipe.value_clip}
        return cls(means, clips, recipe.group_size, int2.FORMATS[recipe.search.format])

    def center_keys(self, sample: QuerySample) -> QuerySample:
        """The sample with the mean subtracted from all its keys. A server reads exact and quantized
        keys alike without their mean."""
        mean = self.means["key"].to(sample.key.device)[:, None]
        return replace(sample, key=sample.key - mean)

    def restore(self, side: str, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Rows `[1, H, T, D]` as the caches of S rotations `[S, H, D, D]` return them.

        Keys must come without their mean, values with it.
        """
        clip = self._clip_ratios(side, matrix)
        if side == "key":
            return fake_quantize(rows, matrix, clip, self.group_size, self.format)
        mean = self.means[side].to(rows.device)[:, None]
        return fake_quantize(rows - mean, matrix, clip, self.group_size, self.format) + mean

    def learnable(self, side: str, matrix: torch.Tensor) -> Codec:
        """The codec with a gradient, for S rotations `[S, H, D, D]` at once."""
        clip = self._clip_ratios(side, matrix).unsqueeze(-1)

        def codec(rotated: torch.Tensor) -> torch.Tensor:
            return straight_through(rotated, clip, self.group_size, self.format)

        return codec

    def _clip_ratios(self, side: str, matrix: torch.Tensor) -> torch.Tensor:
        """Clip ratios `[S, H]` for rotations `[S, H, D, D]`."""
        return torch.full(matrix.shape[:2], self.clips[side], dtype=torch.float64)
