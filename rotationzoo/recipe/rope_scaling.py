"""Rope scaling that a recipe asks for, written as `yarn:4`."""

import re
from dataclasses import dataclass
from typing import Self

KINDS = ("yarn", "linear")
_PATTERN = re.compile(r"(?P<kind>\w+):(?P<factor>\d+(\.\d+)?)(:(?P<positions>\d+))?")


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE is stretched to more positions than a model was trained on."""

    kind: str
    """One of `KINDS`, in the words of transformers' `rope_type`."""
    factor: float
    """How many times as many positions the model gets."""
    positions: int | None = None
    """The positions that the model was trained on; None takes what its config says."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `KIND:FACTOR` or `KIND:FACTOR:POSITIONS`. Raises `ValueError`."""
        match = _PATTERN.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            raise ValueError("must be written as yarn:4, yarn:4:32768 or linear:2")
        positions = int(match["positions"]) if match["positions"] else None
        scaling = cls(match["kind"], float(match["factor"]), positions)
        if scaling.factor <= 1 or positions == 0:
            raise ValueError("must have a factor above 1, and positions above 0")
        return scaling

    def agrees(self, other: Self) -> bool:
        """Whether both are the same scaling. One of them may leave the positions to the config."""
        positions = {self.positions, other.positions} - {None}
        return (self.kind, self.factor) == (other.kind, other.factor) and len(positions) <= 1

    def __str__(self) -> str:
        text = f"{self.kind}:{self.factor:g}"
        return text if self.positions is None else f"{text}:{self.positions}"


def normalize(text: str) -> str:
    """The same scaling in its shortest form, `yarn:4` for `yarn:4.0`. Raises `ValueError`."""
    return str(RopeScaling.parse(text))
