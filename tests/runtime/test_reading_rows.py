"""What reading a layer's rows takes beside the rows: few blocks are restored at a time."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rotationzoo.calibration.fit import fit
from rotationzoo.codec.formats import FORMATS
from rotationzoo.model.geometry import Layer
from rotationzoo.recipe import PRESETS
from rotationzoo.runtime.settings import CacheSettings
from rotationzoo.runtime.stream import READ_TOGETHER, Reach, Stream
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.layout import CacheLayout

HEADS, DIM, BLOCK = 2, 32, 128
WINDOWS = {"sink": 4, "recent": 8}


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors take which operations made since the mode began."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = weakref.WeakValueDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.made |= {id(each): each for each in tree_leaves(result) if hasattr(each, "nbytes")}
        storages = [tensor.untyped_storage() for tensor in self.made.values()]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.peak = max(self.peak, sum(held.values()))
        return result


def stream_of(arm, format, tokens, batch=1):
    rows = torch.randn(batch, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(1))
    storage = CacheSettings(arm, CacheLayout(FORMATS[format], **WINDOWS), block=BLOCK)
    stream = Stream(storage, 0, rows.bfloat16(), rows.bfloat16())
    later = Reach(tokens - WINDOWS["recent"], 0)
    stream.update(rows.bfloat16(), rows.flip(2).bfloat16(), Reach(0, 0), later, None)
    return stream


def rotations():
    return fit(None, PRESETS["random"], [Layer(0, 0, HEADS, HEADS, DIM, DIM)])


@torch.no_grad()
def test_a_long_context_takes_little_beside_its_rows():
    """Measured: 5.5 blocks of float32 rows beside both sides; with eight blocks together, and
    those restored before them still held, 44."""
    stream = stream_of(Arm("", rotations()), "sglang", 100 * BLOCK)
    with PeakMemory() as memory:
        rows = stream.read()
    one = 4 * HEADS * BLOCK * DIM
    assert memory.peak >= sum(each.nbytes for each in rows)
    beside = (memory.peak - sum(each.nbytes for each in rows)) / one
    assert beside <= 3 * READ_TOGETHER["value"]


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_blocks_read_together_are_those_read_alone(format, monkeypatch):
    stream = stream_of(Arm("", rotations(), 16), format, 7 * BLOCK + 5, batch=3)
    for start in (0, 2, 3 * BLOCK, 7 * BLOCK):
        together = stream.read(start)
        with monkeypatch.context() as patch:
            for side in READ_TOGETHER:
                patch.setitem(READ_TOGETHER, side, 1)
            alone = stream.read(start)
        for rows, expected in zip(together, alone, strict=True):
            assert rows.shape == (3, HEADS, stream.length - start, DIM)
            # A product of other rows beside it may differ in its last bit.
            torch.testing.assert_close(rows, expected)
