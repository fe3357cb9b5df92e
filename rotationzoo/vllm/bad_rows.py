"""Requests with a key or value that is not finite: each is named once in the log, and nothing waits
for a GPU."""

from collections import deque
from logging import getLogger
from typing import Any

import torch

from rotationzoo.codec.int2 import LARGEST
from rotationzoo.rotations import SIDES

_WORDS = {"rope": "key with RoPE"}


class BadRows:
    """The bad rows that the layers of a worker have counted, and the request of each block."""

    def __init__(self, layers: dict[int, str], device: torch.device, rows: tuple[str, ...] = SIDES):
        """`layers`: their names by number. `rows`: the two kinds of rows that they store. The
        caller then fills `block_sizes`: the tokens of a block of each layer, by name."""
        self.layers, self.block_sizes = list(layers.items()), dict[str, int]()
        self.rows = [_WORDS.get(each, each) for each in rows]
        self.counted = torch.zeros(len(layers), 2, 2, dtype=torch.int64, device=device)
        """`LayerPages.bad` of each layer."""
        self._owners, self._named = dict[int, str](), deque[str](maxlen=1000)
        self._copy, self._said = self.counted, torch.zeros(len(layers), 2, dtype=torch.int64)
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copy, self._arrived = self.counted.cpu().pin_memory(), torch.cuda.Event()

    def note_blocks(self, scheduled: Any) -> None:
        """Remember the requests of the blocks that vLLM has allocated for a step."""
        later = scheduled.scheduled_cached_reqs
        given = [(each.req_id, each.block_ids) for each in scheduled.scheduled_new_reqs]
        for request, groups in (*given, *zip(later.req_ids, later.new_block_ids, strict=True)):
            for blocks in groups or ():
                self._owners.update(dict.fromkeys(blocks, request))

    def look(self) -> None:
        """Name the requests of rows that were counted up to the last call; on a CPU, up to now."""
        if self._arrived is not None and not self._arrived.query():
            return
        counts = self._copy[..., 0]
        for number, side in (counts > self._said).nonzero().tolist():
            layer, name = self.layers[number]
            block = int(self._copy[number, side, 1]) // self.block_sizes[name]
            request = self._owners.get(block, "(unknown)")
            if request not in self._named:
                self._named.append(request)
                row = f"a {self.rows[side]} of layer {layer}"
                problem = f"{row} is not finite or exceeds {LARGEST:.0e}"
                said = "request %s: %s: its answer is not a number"
                getLogger("vllm.rotationzoo").warning(said, request, problem)
        self._said.copy_(counts)
        if self._arrived is not None:
            self._copy.copy_(self.counted, non_blocking=True)
            self._arrived.record()
