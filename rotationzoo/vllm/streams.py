"""The work that overlaps within a layer of a server's step, on a second stream of the GPU."""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import torch


class StoreStream:
    """The stream that chooses and stores the codes of a step while its queries attend.

    Requests of one step may share pages: vLLM may schedule one that reads a block from the prefix
    cache together with the one that will fill it. So:

    * Exact copies are written on the current stream, before anything is read.
    * `start` stores codes after all earlier work of the current stream, such as the keys and
      values, the plan, and pages that a connector has loaded.
    * Reads of copies, or of the step's own keys and values, overlap with the store.
    * Reads of codes that the step stores come after `wait`: those of another request, if the plan
      says that they `meet`, and those of a new token without a copy.
    * A layer ends with `wait`. So the next layer, the next step, a connector that saves pages, and
      any new owner of the memory find everything written.
    """

    def __init__(self, device: torch.device):
        self.device, self._is_running = device, False

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def start(self, overlaps: bool, store: Callable[..., None], *arguments: Any) -> None:
        """Call `store` with these arguments, on the second stream if it may overlap with what
        follows (`overlaps`), otherwise on the current one. A CPU has only one."""
        if self.device.type != "cuda" or not overlaps:
            store(*arguments)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            store(*arguments)
        self._is_running = True

    def wait(self) -> None:
        """Let the current stream wait until everything is stored."""
        if self._is_running:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            self._is_running = False


find_stream = cache(StoreStream)  # one per device: a layer ends before the next one starts


def may_meet(scheduled: Any, block_tokens: Sequence[int]) -> bool:
    """Whether a request may read blocks that another one fills in the same step, by vLLM's
    `SchedulerOutput`. `block_tokens`: tokens per block of each group.

    Only a new request can: all others have read their blocks before. A running request may fill any
    block, because the scheduler does not list its blocks again.
    """
    begin, go_on = scheduled.scheduled_new_reqs, scheduled.scheduled_cached_reqs
    has_hits = any(request.num_computed_tokens for request in begin)
    if go_on.resumed_req_ids or (has_hits and go_on.req_ids):
        return True
    read, filled = set[tuple[int, int]](), set[tuple[int, int]]()
    for request in begin:
        for group, (blocks, tokens) in enumerate(zip(request.block_ids, block_tokens, strict=True)):
            held = request.num_computed_tokens // tokens
            read.update((group, block) for block in blocks[:held])
            filled.update((group, block) for block in blocks[held:])
    return not read.isdisjoint(filled)
