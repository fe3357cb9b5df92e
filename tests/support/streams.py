"""The second stream of a GPU, simulated on a CPU: its work is done as early, as late or as mixed
with that of the current stream as the waits allow."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from rotationzoo.vllm import prompts
from rotationzoo.vllm.pages import LayerPages
from rotationzoo.vllm.prompts import LayerReader, TorchAttention
from rotationzoo.vllm.streams import StoreStream


class LateStream(StoreStream):
    """Works when it is waited for, which each layer does in the end."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.work: list[Callable[[], None]] = []

    def start(self, overlaps, store, *arguments) -> None:
        assert not self.work, "the layer before has not waited"
        if not overlaps:
            store(*arguments)
            return
        step, rows = arguments
        self.work = [partial(store, step, {side: each}) for side, each in rows.items()]

    def wait(self) -> None:
        while self.work:
            self.work.pop(0)()


class DrawnStream(LateStream):
    """Does a part of its work before a part of the current stream's, where a test has drawn it."""

    def __init__(self, device: torch.device, draws: Iterator[bool]):
        super().__init__(device)
        self.draws = draws

    def start(self, *arguments) -> None:
        super().start(*arguments)
        self.go_on()

    def go_on(self) -> None:
        while self.work and next(self.draws):
            self.work.pop(0)()


PARTS = [
    (LayerPages, "copy"),
    (LayerPages, "attend"),
    (LayerReader, "_gather"),
    (LayerReader, "_restore"),
    (TorchAttention, "attend"),
    (TorchAttention, "merge"),
]
"""What the current stream does, part by part."""


def play(set_attribute: Callable[[object, str, object], None], stream: StoreStream) -> None:
    """Let layers that are made from now on have this stream."""
    set_attribute(prompts, "find_stream", lambda device: stream)
    for owner, name in PARTS if isinstance(stream, DrawnStream) else []:
        set_attribute(owner, name, _after(stream.go_on, getattr(owner, name)))


def _after(first: Callable[[], None], then: Callable) -> Callable:
    def both(*arguments, **others):
        first()
        return then(*arguments, **others)

    return both
