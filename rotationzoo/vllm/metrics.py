"""What a server reports about its 2-bit cache: numbers at `/metrics`, next to vLLM's own, and in
its log the requests with bad rows.

Workers and the API server run in different processes. So each worker keeps its numbers in
prometheus_client's multiprocess files: where vLLM looks for them, or in a folder of ours that the
API server passes to its child processes in an environment variable.
"""

import os
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from logging import getLogger
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from rotationzoo import __version__
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.codec.int2 import LARGEST
from rotationzoo.rotations import SIDES
from rotationzoo.vllm import FOLDER
from rotationzoo.vllm.settings import parse_options, read_settings
from rotationzoo.vllm.steps import Planner

SHARED = "PROMETHEUS_MULTIPROC_DIR"  # vLLM's folder, if this is set or it has several API servers
METRICS = {
    "copy_slots_used": "Slots that hold the exact copies of a page",
    "copies_forgotten_total": "Pages that lost their slot while they still held their tokens",
    "requests_sink_from_codes": "Decoding requests that read some of their sink from codes",
    "requests_recent_from_codes": "Decoding requests that read recent tokens from codes",
    "key_rows_not_finite_total": "Stored keys that are not finite, or too large",
    "value_rows_not_finite_total": "Stored values that are not finite, or too large",
    "artifact_info": "The artifact in use, by its sha256, and the format of its codes",
    "bits_per_element": "Stored bits per element of the cache, with scales and offsets",
    "layers": "Layers that are stored as codes",
    "start_check_distance": "Distance from the definition in the self-check, at most 0.25",
    "copy_slots": "Slots for exact copies of the pages that windows touch",
}
COUNTED = [*METRICS][:6]  # in the order in which a worker counts them


def answer_for_workers() -> None:
    """Make this process report for the workers that it will start, unless vLLM does."""
    if SHARED not in os.environ and FOLDER not in os.environ:
        os.environ[FOLDER] = folder = _make_folder().name
        MultiProcessCollector(REGISTRY, folder)


_make_folder = cache(lambda: TemporaryDirectory(prefix="rotationzoo-"))  # until the process ends


class Metrics:
    """The numbers of a worker with this planner and this `distance` in its self-check."""

    def __init__(self, worker: Any, planner: Planner, distance: float) -> None:
        config, layers = worker.vllm_config, [*worker.stored]
        self._planner, self._bad_rows = planner, worker.bad_rows
        answer_for_workers()  # on a machine without an API server
        folder = os.environ.get(SHARED) or os.environ[FOLDER]
        name = f"{os.getpid()}-rotationzoo.db"  # the process may have metrics of its own
        self._files = [MmapedDict(f"{folder}/{kind}_{name}") for kind in ("gauge_max", "counter")]
        engine = config.parallel_config.data_parallel_index
        self._labels = {"engine": str(engine), "rank": str(worker.rank)}
        on_gpu, self._due = torch.cuda.is_available(), 0.0
        self._counts = torch.zeros(len(COUNTED), dtype=torch.int64, pin_memory=on_gpu)
        options, settings = parse_options(config.additional_config), read_settings(config)
        codec, format = settings.codec, settings.layout.format
        sides = (each for each in codec.rotations.each() if each[0] in layers)
        bits = [codec.stored_bits(layer, side, each.dim, format) for layer, side, each in sides]
        self._write(
            {"artifact_info": 1},
            artifact=options.open().identity,
            format={each: name for name, each in SIMULATED.items()}[format],
            version=__version__,
        )
        self._write({"bits_per_element": fmean(bits), "layers": len(layers)})
        self._write({"start_check_distance": distance, "copy_slots": planner.slots - 1})
        self._write(dict.fromkeys(COUNTED, 0))

    def follow(self, ends: bool) -> None:
        """After a step, at most once a second, write what was counted. This does not wait for a
        GPU, whose last counts are written next time, unless nothing is left to run (`ends`)."""
        if (now := time.monotonic()) < self._due and not ends:
            return
        if not self._planner.has_planned:  # vLLM may begin with a step of no tokens
            return
        self._due = now + 1
        counts = self._planner.count(), self._bad_rows.counted[..., 0].sum(0)
        self._counts.copy_(torch.cat(counts), non_blocking=not ends)
        if ends:
            self._counts[2:4] = 0  # no request decodes
        self._write(dict(zip(COUNTED, self._counts.tolist(), strict=True)))

    def _write(self, numbers: Mapping[str, float], **labels: str) -> None:
        labels |= self._labels
        for name, number in numbers.items():
            named = f"rotationzoo_{name.removesuffix('_total')}", f"rotationzoo_{name}"
            key = mmap_key(*named, [*labels], [*labels.values()], METRICS[name])
            self._files[name.endswith("_total")].write_value(key, float(number), 0.0)


_WORDS = {"rope": "key with RoPE"}


class BadRows:
    """The bad rows that the layers of a worker have counted, and the request of each block. Nothing
    waits for a GPU."""

    def __init__(self, layers: dict[int, str], device: torch.device, rows: tuple[str, ...] = SIDES):
        """`layers`: their names by number. `rows`: the two kinds of rows that they store. The
        caller then fills `block_sizes`: the tokens of a block of each layer, by name."""
        self.layers, self.block_sizes = list(layers.items()), dict[str, int]()
        self.rows = [_WORDS.get(each, each) for each in rows]
        # `LayerPages.bad` of each layer
        self.counted = torch.zeros(len(layers), 2, 2, dtype=torch.int64, device=device)
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
