"""GPUs by name or by size."""

import re
from dataclasses import dataclass

from rotationzoo.errors import UsageError
from rotationzoo.words import nearest

USABLE = 0.9
"""The share of a GPU's memory for weights and cache; the rest is for activations and the CUDA
context. It was for years the default of vLLM's `gpu_memory_utilization`."""
_GIB = 1 << 30
_UNITS = {"gib": _GIB, "gb": 10**9, "g": _GIB, "tib": 1024 * _GIB, "tb": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|tib|tb)", re.IGNORECASE)
_SEVERAL = re.compile(r"(\d{1,4})\s*[x*]\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    """One GPU, or several of one kind that share a model evenly."""

    kind: str
    memory: int
    """Bytes of all of them."""
    count: int = 1

    @property
    def name(self) -> str:
        return self.kind if self.count == 1 else f"{self.count} x {self.kind}"

    @property
    def usable(self) -> int:
        """Bytes for weights and cache."""
        return int(self.memory * USABLE)


# From NVIDIA's data sheets. That of "DGX B200" has 1,440 GB for eight; the chip's announcement said
# 192 GB. What they call GB is nearer to GiB: a 24 GB card reports 24 GiB, an H100 79.6 of 80.
_SIZES = {
    "RTX 3090": 24, "RTX 4090": 24, "L40S": 48, "A100 80GB": 80, "H100": 80, "H200": 141,
    "B200": 180,
}  # fmt: skip
CARDS = {name: Card(name, size * _GIB) for name, size in _SIZES.items()}


def several(card: Card, count: int) -> Card:
    """So many times a card."""
    return Card(card.kind, card.memory * count, card.count * count)


def parse_card(text: str) -> Card:
    """A GPU from its name (`H100`), its memory (`24GiB`), or several of one (`2x24GiB`). Raises
    `UsageError`."""
    match = _SEVERAL.fullmatch(text.strip())
    if match and int(match[1]) > 0:
        return several(parse_card(match[2]), int(match[1]))
    names = {_plain(name): name for name in CARDS}
    plain = _plain(text)
    for candidate in (plain, f"rtx{plain}"):
        if candidate in names:
            return CARDS[names[candidate]]
    size = _SIZE.fullmatch(text.strip())
    if size and (memory := int(float(size[1]) * _UNITS[size[2].lower()])) > 0:
        return Card(text.strip(), memory)
    raise UsageError(
        f"--gpu {text!r} is neither a card's name nor an amount of memory{nearest(text, CARDS)}",
        hint=f"give one such as 24GiB, 2x24GiB, or a card: {', '.join(CARDS)}",
    )


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|80gb|sxm", "", text.lower())
