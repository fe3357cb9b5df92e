"""GPUs by name or by size."""

import re
from dataclasses import dataclass, replace

from rotationzoo.errors import UsageError
from rotationzoo.words import nearest

UTILIZATION = 0.92
"""The share of a GPU's memory that vLLM takes by default (`gpu_memory_utilization`)."""
OWN = 1_380_000_000
"""Bytes of it that vLLM 0.32.0 keeps on a GPU for activations, graphs and itself: so it was for
Qwen3-8B's shape on an H100, with 8,192 tokens and 64 requests a step (docs/plan.md)."""
_GIB = 1 << 30
_UNITS = {"gib": _GIB, "gb": 10**9, "g": _GIB, "tib": 1024 * _GIB, "tb": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|tib|tb)", re.IGNORECASE)
_SEVERAL = re.compile(r"(\d{1,4})\s*[x*]\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    """One GPU, or a `count` of one kind that share a model evenly."""

    kind: str
    memory: int
    """Bytes of one."""
    count: int = 1

    @property
    def name(self) -> str:
        return self.kind if self.count == 1 else f"{self.count} x {self.kind}"

    @property
    def usable(self) -> int:
        """Bytes of all of them for weights and cache in a server."""
        return max(0, int(self.count * self.memory * UTILIZATION) - self.count * OWN)


OTHERS = "T4", "MI300X"  # too old, or of AMD: our kernels do not run on them
# GiB as PyTorch's errors report them ("has a total capacity of"), up to 8 % less than a data sheet.
_SIZES = {
    "RTX 3090": 23.56, "RTX 4090": 23.52, "RTX 5060 Ti": 15.47, "RTX 5070": 11.49,
    "RTX 5070 Ti": 15.46, "RTX 5080": 15.47, "RTX 5090": 31.36, "RTX A6000": 47.4,
    "RTX PRO 6000": 94.97, "T4": 14.56, "L4": 22.03, "A10G": 21.99, "L40S": 44.39,
    "A100 80GB": 79.15, "H100": 79.18, "H200": 139.8, "B200": 178.35, "MI300X": 191.69,
}  # fmt: skip
CARDS = {name: Card(name, int(size * _GIB)) for name, size in _SIZES.items()}


def parse_card(text: str) -> Card:
    """A GPU from its name (`H100`), its memory (`24GiB`), or several of one (`2x24GiB`). Raises
    `UsageError`."""
    match = _SEVERAL.fullmatch(text.strip())
    if match and int(match[1]) > 0:
        each = parse_card(match[2])
        return replace(each, count=each.count * int(match[1]))
    known, plain = {_plain(name): card for name, card in CARDS.items()}, _plain(text)
    if card := known.get(plain) or known.get(f"rtx{plain}"):
        return card
    size = _SIZE.fullmatch(text.strip())
    if size and (memory := int(float(size[1]) * _UNITS[size[2].lower()])) > 0:
        return Card(text.strip(), memory)
    raise UsageError(
        f"--gpu {text!r} is neither a card's name nor an amount of memory{nearest(text, CARDS)}",
        hint=f"give one such as 24GiB, 2x24GiB, or a card: {', '.join(CARDS)}",
    )


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|tesla|blackwell|80gb|sxm", "", text.lower())
