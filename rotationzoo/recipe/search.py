"""The keys of a search: which rotations and clip ratios compete, and what they are judged on."""

from typing import Annotated

from pydantic import Field, field_validator

from rotationzoo.codec.formats import FORMATS
from rotationzoo.linalg.compositions import COMPOSITIONS
from rotationzoo.recipe.section import Count, Section
from rotationzoo.words import nearest

ADDED_TO_SEARCH = ("prompts", "composition", "center_keys", "equalize", "heads")
"""Keys that artifacts have been published without, as `ADDED` in `recipe.schema`."""


class Search(Section):
    """How rotations and clip ratios are chosen, on calibration text that the statistics have not
    seen.

    One clip ratio for keys and one for values are always searched. What else is tried depends on
    the keys below.
    """

    texts: Count = 16
    """Rows of calibration text that are held out for choosing; never more than a third of all
    rows."""
    prompts: Annotated[int, Field(ge=0, le=10**6)] = 40
    """Prompts that ask the model about their own text, divided among the recall tasks that it can
    do. Rotations are chosen by its answers; with 0, by its predictions on the held-out rows
    alone."""
    composition: tuple[str, ...] = ()
    """Compositions that compete with the recipe's own."""
    center_keys: tuple[bool, ...] = ()
    """Values of `center_keys` that compete with the recipe's own."""
    equalize: tuple[bool, ...] = ()
    """Values of `equalize` that compete with the recipe's own."""
    heads: bool = True
    """Whether to choose, and learn, a rotation for every head, too. The keys below are for this."""
    queries: Count = 64
    """Queries sampled per row."""
    starts: Count = 3
    """How many closed-form rotations per head serve as starting points for learning."""
    steps: Annotated[int, Field(ge=0, le=10**6)] = 300
    """Gradient steps; 0 chooses among the closed forms alone."""
    rate: Annotated[float, Field(gt=0)] = 0.015
    """Adam's learning rate, on the entries of the skew-symmetric matrix that turns a rotation."""
    format: str = "sglang"
    """The engine's 2-bit format in which candidates are scored, from `codec.formats.FORMATS`."""

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        if value not in FORMATS:
            raise ValueError(f"must be one of {', '.join(FORMATS)}{nearest(value, FORMATS)}")
        return value

    @field_validator("composition")
    @classmethod
    def _known_compositions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in COMPOSITIONS:
                names = ", ".join(COMPOSITIONS)
                raise ValueError(f"must be among {names}{nearest(name, COMPOSITIONS)}")
        return value

    def held_out(self, rows: int) -> int:
        """How many of `rows` rows are held out for choosing."""
        return min(self.texts, rows // 3)
