"""Which requests have a key or value that is not finite: each is named once in the log, and nothing
waits for a GPU."""

from collections import deque
from collections.abc import Mapping
from logging import getLogger
from typing import Any

import torch

from rotationzoo.codec.int2 import LARGEST
from rotationzoo.rotations import SIDES


class BadRows:
    """What the layers of a worker have counted, and which request has which block of vLLM's."""

    def __init__(self, layers: Mapping[int, str], device: torch.device):
        """For layers by number, with their names."""
        self.layers = layers
        self.counted = torch.zeros(len(layers), 2, 2, dtype=torch.int64, device=device)
        """What `LayerPages` of each layer count, `bad` there."""
        self.block_sizes: dict[str, int] = {}
        """Tokens of a block of each layer, by name."""
        self._owners: dict[int, str] = {}
        self._named: deque[str] = deque(maxlen=1000)
        self._said = torch.zeros(len(layers), 2, dtype=torch.int64)
        self._copy, self._arrived = self.counted, None  # on a CPU, nothing is copied
        if device.type == "cuda":
            self._copy = torch.zeros_like(self.counted, device="cpu").pin_memory()
            self._arrived = torch.cuda.Event()

    def note_blocks(self, scheduled: Any) -> None:
        """Remember whose blocks are those that vLLM has given out for a step."""
        later = scheduled.scheduled_cached_reqs
        given = [(each.req_id, each.block_ids) for each in scheduled.scheduled_new_reqs]
        for request, groups in (*given, *zip(later.req_ids, later.new_block_ids, strict=True)):
            for blocks in groups or ():
                self._owners.update(dict.fromkeys(blocks, request))

    def look(self) -> None:
        """Name the requests of the rows that were counted until an earlier call, or this one on a
        CPU."""
        if self._arrived is None:
            self._name_new()
        elif self._arrived.query():
            self._name_new()
            self._copy.copy_(self.counted, non_blocking=True)
            self._arrived.record()

    def _name_new(self) -> None:
        counts, layers = self._copy[..., 0], list(self.layers.items())
        for number, side in (counts > self._said).nonzero().tolist():
            layer, name = layers[number]
            place = int(self._copy[number, side, 1])
            request = self._owners.get(place // self.block_sizes[name], "that is not known")
            if request not in self._named:
                self._named.append(request)
                problem = f"a {SIDES[side]} of layer {layer} is not finite or exceeds {LARGEST:.0e}"
                said = "request %s: %s: its answer is not a number"
                getLogger("vllm.rotationzoo").warning(said, request, problem)
        self._said.copy_(counts)
