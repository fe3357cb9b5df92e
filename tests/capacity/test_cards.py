"""GPUs by name and by size."""

import pytest

from rotationzoo.capacity.cards import parse_card
from rotationzoo.errors import UsageError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name", "memory"),
    [
        ("24GiB", "24GiB", 24 * GIB),
        ("24 gb", "24 gb", 24 * 10**9),
        ("79.6GiB", "79.6GiB", int(79.6 * GIB)),
        ("RTX 3090", "RTX 3090", 24 * GIB),
        ("rtx4090", "RTX 4090", 24 * GIB),
        ("3090", "RTX 3090", 24 * GIB),
        ("h100", "H100", 80 * GIB),
        ("A100-80GB", "A100 80GB", 80 * GIB),
        ("2x24GiB", "2 x 24GiB", 48 * GIB),
        ("8 x H200", "8 x H200", 8 * 141 * GIB),
        ("2x 2x 24GiB", "4 x 24GiB", 96 * GIB),
    ],
)
def test_names_and_sizes(text, name, memory):
    card = parse_card(text)
    assert (card.name, card.memory) == (name, memory)
    assert card.usable == int(0.9 * memory)


@pytest.mark.parametrize("text", ["", "banana", "24", "0GiB", "-1GiB", "0x H100", "H101", "1e9GiB"])
def test_anything_else_is_refused(text):
    with pytest.raises(UsageError) as error:
        parse_card(text)
    assert "24GiB" in error.value.hint
