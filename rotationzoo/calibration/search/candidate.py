"""A candidate of a search: rotations for the whole model, and the recipe that they follow."""

from dataclasses import dataclass, replace

from rotationzoo.calibration.search.choice import BASELINE
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import SIDES, Rotations


@dataclass(frozen=True)
class Candidate:
    """Rotations for the whole model."""

    variant: str
    """The name of the variant of the recipe, from `recipe.variants`."""
    recipe: Recipe
    """The recipe that the rotations follow."""
    rotations: Rotations
    heads: str = BASELINE
    """The sides that were chosen head by head: `keys`, `values`, `both`, or `own` for none."""

    @property
    def clips(self) -> dict[str, float]:
        """Side -> the clip ratio of all its heads."""
        first = next(iter(self.rotations.values()))
        return {side: round(first[side].clip[0].item(), 4) for side in SIDES}

    @property
    def kind(self) -> str:
        """What the candidate is, at whatever clip ratios."""
        if self.heads == BASELINE:
            return self.variant
        return f"{self.variant}, {self.heads} by head"

    @property
    def name(self) -> str:
        """A name that no other candidate has."""
        clips = self.clips
        return f"{self.kind}, clip {clips['key']:g}/{clips['value']:g}"

    def with_clip(self, side: str, ratio: float) -> "Candidate":
        """The same candidate with one clip ratio for all heads of a side."""
        return replace(self, rotations=self.rotations.with_clip(side, ratio))
