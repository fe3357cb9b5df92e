"""A budget of bits: how many an element takes, with its scales, on average over layers."""

from dataclasses import dataclass

from rotationzoo.errors import UsageError
from rotationzoo.sides import EVERY_SIDE

LEAST, MOST = 1.0, 4.0
"""The bounds of each number, an average over rows whose channels have 0 to 8 bits."""
_HINT = "write it as: --bits 2.5, or --key-bits 3 --value-bits 2.5"


@dataclass(frozen=True)
class Budget:
    """`bits` for keys and values together, or `key_bits` and `value_bits`, or none of them if all
    rows have the same bits. Raises `UsageError` for other combinations, and out of bounds."""

    bits: float | None = None
    key_bits: float | None = None
    value_bits: float | None = None

    def __post_init__(self) -> None:
        sides = [self.key_bits, self.value_bits]
        if any(sides) and (self.bits or not all(sides)):
            raise UsageError("give bits, or key_bits and value_bits together", _HINT)
        for name, bits in vars(self).items():
            is_number = isinstance(bits, int | float)
            if bits is not None and not (is_number and LEAST < bits <= MOST):
                bounds = f"more than {LEAST:g} and at most {MOST:g} bits"
                raise UsageError(f"{name} = {bits} is not a budget of {bounds}", _HINT)

    def __bool__(self) -> bool:
        return self.bits is not None or self.key_bits is not None

    @property
    def shares(self) -> list[tuple[tuple[str, ...], float]]:
        """The sides that share a number of bits, and that number."""
        shares = (EVERY_SIDE, self.bits), (("key",), self.key_bits), (("value",), self.value_bits)
        return [(sides, bits) for sides, bits in shares if bits is not None]


class EvenBudget(Budget):
    """A budget with the same bits for the keys of all layers, and for the values."""


EQUAL = Budget()
"""The same bits in all rows."""
