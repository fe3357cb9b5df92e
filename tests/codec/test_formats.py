"""The one list of formats: the command line reads it without torch, and the docs name them all."""

import pytest
from support.places import ROOT

from rotationzoo.codec.formats import FORMATS, SIMULATED


@pytest.mark.parametrize("name", SIMULATED)
def test_every_format_is_documented(name):
    text = (ROOT / "docs" / "codec.md").read_text(encoding="utf-8")
    assert name in text


def test_what_the_kernels_write_can_be_evaluated():
    assert FORMATS.items() <= SIMULATED.items()


@pytest.mark.parametrize(("name", "bits"), [("sglang", 32), ("vllm", 16), ("mlx", 16)])
def test_metadata_bits(name, bits):
    assert FORMATS[name].metadata_bits == bits
