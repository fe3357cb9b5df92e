"""Decoding steps of a model with a 2-bit cache, replayed as a CUDA graph."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from transformers import Cache, PreTrainedModel

from rotationzoo.cache.decoding_step import MaskCheck, has_kernel
from rotationzoo.cache.fixed_layer import Attend, Counters, FixedLayer
from rotationzoo.cache.graph_checks import HINT, check_graph
from rotationzoo.cache.paged_attention import PageReading
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.codec import attention, cuda_attention
from rotationzoo.errors import UnsupportedModel, UsageError


class DecodingGraph:
    """Decoding steps of a model with a `RotatedCache` that has read a prompt::

        with DecodingGraph(model, cache) as step:
            for _ in range(100):
                ids = step(ids).argmax(-1, keepdim=True)

    A step computes what `model(ids, past_key_values=cache)` does. Where the cache lies on an NVIDIA
    GPU and there is a kernel for its pages, the step is a CUDA graph: the CPU launches all layers
    at once. Elsewhere it runs as the model does, and so it does with `eager`.

    Tokens that leave the recent window wait until there are `room` of them, and are then quantized
    together, outside the graph. Until then they are read exact: at most `room - 1` tokens more than
    `recent`. The cache tells its length, and cannot be used otherwise before `close`, which gives
    it its tokens back.

    Raises `UsageError` for arguments that do not belong together, and `UnsupportedModel` for a
    model whose steps cannot be replayed: one with layers that are not `RotatedLayer`, with weights
    on several devices, or that waits for the GPU.
    """

    def __init__(
        self, model: PreTrainedModel, cache: RotatedCache, room: int = 64, eager: bool = False
    ):
        layers = check_graph(model, cache, room)
        (stream,) = layers[0].streams
        self.model: Any = model
        self.cache, self.device = cache, layers[0].device
        has_pages_kernel = has_kernel(stream, stream.tail["key"])
        attend: Attend = cuda_attention.attend if has_pages_kernel else attention.attend
        self.captures = has_pages_kernel and not eager
        """Whether steps are replays of a graph."""
        # torch does not let tensors that were made in inference mode change outside it.
        self._inference = stream.tail["key"].is_inference()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor
        self._layers: list[FixedLayer] = []
        with self._prepared():
            self._counters = Counters(stream.batch, self.device)
            self._ids = torch.zeros_like(self._counters.position)
            # A mask of four dimensions is passed on as it is, so the model makes none of its own.
            self._mask = torch.zeros(stream.batch, 1, 1, 1, dtype=model.dtype, device=self.device)
            try:
                for layer in layers:
                    fixed = FixedLayer(layer, self._counters, room, attend)
                    fixed.masks = MaskCheck(self._mask, passed=True)
                    self._layers.append(fixed)
                self._fixed = _FixedCache(self._layers)
                self._settle()
                if self.captures:
                    self._make_room()
                    self._capture()
            except BaseException:  # such as a GPU without memory for the buffers
                self.close()
                raise

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The logits `[B, vocabulary]` after one more token of every row, `token_ids` `[B, 1]`.

        Raises `UsageError` for ids of another shape, and after `close`.
        """
        if not self._layers:
            raise UsageError("these steps have ended", hint="make another DecodingGraph")
        if token_ids.shape != self._ids.shape:
            raise UsageError(
                f"a step takes one token of every row, {[*self._ids.shape]}, and not "
                f"{[*token_ids.shape]}",
                hint="give the last tokens alone: ids[:, -1:]",
            )
        with self._prepared():
            self._make_room()
            self._ids.copy_(token_ids)
            if self._graph is not None:
                self._graph.replay()
                logits = self._logits.clone()  # the next step writes to the same place
            else:
                logits = self._run()
        self._length += 1
        for layer in self._layers:
            layer.layer.columns += 1  # so that the cache knows its length
        return logits

    def close(self) -> None:
        """Give the tokens back to the cache, with those that have left its window quantized."""
        self._drop_graph()
        layers, self._layers = self._layers, []
        with self._prepared():
            # All of them before any allocates memory, which may fail.
            for layer in layers:
                layer.close(layer.held)
            for layer in layers:
                layer.tidy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Run on the device of the cache, without gradients, and in the mode of its tensors."""
        on_gpu = self.device.type == "cuda"
        device = torch.cuda.device(self.device) if on_gpu else nullcontext()
        with device, torch.inference_mode(self._inference), torch.no_grad():
            yield

    def _make_room(self) -> None:
        """Quantize tokens where the tail has no place for another."""
        if self._length < self._layers[0].limit:
            return
        for layer in self._layers:
            layer.flush(self._length)
        before = self._tables
        self._settle()
        moved = any(old is not new for old, new in zip(before, self._tables, strict=True))
        if self._graph is not None and moved:
            self._capture()

    def _settle(self) -> None:
        """Take over lengths and tables of addresses from the streams."""
        self._length = self._layers[0].stream.exact_tokens
        # A graph remembers where the tables are; they grow by doubling.
        self._tables = [side.addresses() for layer in self._layers for side in layer.packed.sides]
        self._set_counters()

    def _set_counters(self) -> None:
        stream = self._layers[0].stream
        head = self.cache.storage.windows.sink if stream.head else 0
        self._counters.set(head, stream.tail_start - head, self._length)

    def _run(self) -> torch.Tensor:
        """A step from `_ids` to logits."""
        output = self.model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=self._counters.position,
            past_key_values=self._fixed,
            use_cache=True,
        )
        self._counters.advance()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _capture(self) -> None:
        """Capture a step; what it writes is overwritten by the next one. Raises `UnsupportedModel`
        where that fails."""
        self._drop_graph()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                self._run()  # compiles, and allocates what libraries keep
                self._set_counters()
                self._check_waits()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        self._set_counters()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._logits = self._run()
        except RuntimeError as error:
            raise self._refusal("cannot be captured") from error
        self._graph = graph

    def _check_waits(self) -> None:
        """Run a step. Raises `UnsupportedModel` where it waits for the GPU, which no graph can."""
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings(action="ignore"):  # that it misses some ways to wait
                torch.cuda.set_sync_debug_mode("error")
            self._run()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            raise self._refusal("waits for the GPU") from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def _refusal(self, cause: str) -> UnsupportedModel:
        name = type(self.model).__name__
        return UnsupportedModel(
            f"a step of {name} {cause}, so it cannot be a CUDA graph", f"{HINT}, or give eager=True"
        )

    def _drop_graph(self) -> None:
        """Free the graph and its memory, after its last replay."""
        if self._graph is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._graph = None


class _FixedCache(Cache):
    """The cache that a model sees during steps."""

    def __init__(self, layers: list[FixedLayer]):
        super().__init__(layers=[*layers])
        self.page_reading = PageReading(wanted=True)
