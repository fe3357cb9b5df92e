"""vLLM's attention backend for keys and values in 2 bits, and the worker that gives it to layers.

Layers with a sliding window, and a model that drafts tokens, keep vLLM's own backend and dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pkgutil import resolve_name
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from rotationzoo.codec.attention import Scores
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import shares_blocks
from rotationzoo.rotations import SIDES
from rotationzoo.sides import LATENTS
from rotationzoo.vllm import CPU_BACKENDS, GPU_HEADS, GPU_LATENTS, SERVE
from rotationzoo.vllm import settings as serving
from rotationzoo.vllm import upstream as base
from rotationzoo.vllm.flash_attention import choose_attention
from rotationzoo.vllm.metrics import BadRows, Metrics
from rotationzoo.vllm.pages import LayerPages, Rows, page_tokens, split_blocks
from rotationzoo.vllm.plugin import claim
from rotationzoo.vllm.prompts import LayerReader, scratch_sizes
from rotationzoo.vllm.segments import DECODE_THRESHOLD, HostMetadata
from rotationzoo.vllm.steps import Planner, Step, count_slots
from rotationzoo.vllm.streams import may_meet


@dataclass
class RotatedMetadata(base.AttentionMetadata):  # type: ignore[misc]
    """What the layers of a step get."""

    num_actual_tokens: int
    step: Step


class RotatedBuilder(base.AttentionMetadataBuilder[RotatedMetadata]):  # type: ignore[misc]
    """Plans each step for all layers with the same blocks. vLLM makes a builder for each size of
    pages. One of them leads: it plans a step, and the others return its plan. With a plan for each
    of 24 sizes, the CPU took 5.6 to 11 ms for steps that take a GPU 5.2 ms."""

    # In a captured step, all requests have the same number of new tokens.
    _cudagraph_support: ClassVar = base.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.threshold = max(DECODE_THRESHOLD, serving.verified_tokens(vllm_config))
        self._init_reorder_batch_threshold(self.threshold)
        self.meets = True  # until the worker sets it
        self.tokens = page_tokens(kv_cache_spec.block_size)
        self.pages = kv_cache_spec.block_size // self.tokens  # of a block
        self.leader = self
        self._planned: tuple[Any, RotatedMetadata] | None = None

    @cached_property
    def planner(self) -> Planner:
        # Made with the first step: vLLM may count its pages after it has made this builder.
        settings = serving.read_settings(self.vllm_config)
        layers = self.vllm_config.compilation_config.static_forward_context
        return Planner(
            settings.layout,
            self.tokens,
            self.vllm_config.cache_config.num_gpu_blocks * self.pages,
            self.vllm_config.scheduler_config.max_num_seqs,
            self.device,
            layers[self.layer_names[0]].impl.attention.segment,
            serving.verified_tokens(self.vllm_config),
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> RotatedMetadata:
        """Plan a step, or return the plan for the same metadata."""
        if self.leader is not self:
            return self.leader.build(common_prefix_len, common_attn_metadata, fast_build)
        # A draft model changes its metadata between steps, and asks for a fast build.
        if fast_build or self._planned is None or self._planned[0] is not common_attn_metadata:
            self._planned = common_attn_metadata, self._plan(common_attn_metadata)
        return self._planned[1]

    def _plan(self, common: Any) -> RotatedMetadata:
        lengths = common.seq_lens_cpu_upper_bound
        lengths = common.seq_lens if lengths is None else lengths
        counts = common.query_start_loc_cpu.diff().long()
        host = HostMetadata(
            counts, lengths.cpu().long(), common.max_seq_len, self.threshold, self.meets
        )
        table, mapping = self._pages_of(common.block_table_tensor), common.slot_mapping
        new, tokens = common.query_start_loc.diff(), common.num_actual_tokens
        step = self.planner.plan(table, common.seq_lens, new, mapping[:tokens], host)
        return RotatedMetadata(tokens, step)

    def forget(self, blocks: list[int]) -> None:
        """Drop the exact copies of blocks that something other than our layers writes."""
        numbers = torch.tensor(blocks).to(self.device, non_blocking=True)
        self.planner.forget(self._pages_of(numbers))

    def _pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """The pages `[..., N * pages]` of blocks `[..., N]`."""
        if self.pages > 1:
            inside = torch.arange(self.pages, dtype=blocks.dtype, device=blocks.device)
            blocks = (blocks[..., None] * self.pages + inside).flatten(-2)
        return blocks


class RotatedImpl(base.AttentionImpl[RotatedMetadata]):  # type: ignore[misc]
    """The attention of one layer over pages of codes."""

    builder: ClassVar[type[RotatedBuilder]] = RotatedBuilder
    spec: ClassVar = base.FullAttentionSpec  # of the layers that are served

    def __init__(  # noqa: PLR0913 (vLLM's own arguments)
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        unserved = {
            "ALiBi": alibi_slopes is not None,
            f"attention of the kind {attn_type!r}": attn_type != "decoder",
            "caches that layers share": kv_sharing_target_layer_name is not None,
            "CUSTOM for layers with a sliding window": sliding_window is not None,
        }
        for what, asked in unserved.items():
            if asked:
                raise UnsupportedModel(f"this backend serves no rotations with {what}", SERVE)
        self.config = config = base.get_current_vllm_config()
        self.settings = settings = serving.read_settings(config)
        is_cuda, dtype = config.device_config.device_type == "cuda", config.model_config.dtype
        if is_cuda:
            serving.check_kernels(settings, dtype, head_size)
        self.most_requests = config.scheduler_config.max_num_seqs, serving.verified_tokens(config)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size = self.query_size = self.value_size = head_size
        self.layer = -1  # until the worker sets its number
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.scores = Scores(self.scale, logits_soft_cap or None, sinks)
        self.attention = choose_attention(head_size, dtype, sinks is not None, is_cuda)
        self.max_tokens = config.scheduler_config.max_num_batched_tokens
        self.reader: LayerReader | None = None
        self.reserved: torch.Tensor | None = None
        self.bad: torch.Tensor | None = None  # counts rows that are not finite

    def make_backend(self, backend: Any, layer: int) -> Any:
        """The backend of the layer with this number, a subclass of the one of all layers."""
        # vLLM calls `customize_spec` of a class, and does not say for which layer. So each layer
        # has a class. They have one name, by which vLLM compares backends.
        of_layer = partial(self.customize_spec, layer)
        own = {"customize_spec": of_layer, "get_builder_cls": lambda: self.builder}
        return type(backend.__name__, (backend,), own)

    def customize_spec(self, layer: int, spec: Any) -> Any:
        """The spec of this layer's cache as codes. Raises `UnsupportedModel` for another kind."""
        if type(spec) is not self.spec:
            problem = "rotations are served only with full attention and sliding windows"
            raise UnsupportedModel(problem, "read it with transformers: rotationzoo generate")
        layers = {layer}
        if shares_blocks(self.config.model_config.hf_config):
            # vLLM pads the blocks of all layers to the largest.
            layers = serving.served_layers(self.settings, self.config)
        given = spec.dtype.itemsize, self.num_kv_heads
        size = partial(serving.cell_bytes, self.settings, spec.head_size)
        cell = max(size(each, *given) for each in layers)
        stored = replace(spec, state_content_bytes=cell)
        others = self.config.compilation_config.static_forward_context.values()
        has_windows = any(getattr(each, "sliding_window", None) is not None for each in others)
        has_budget = self.settings.codec.rotations.has_budget
        # A cell may not be a whole number of the model's elements. With windows, another dtype
        # makes vLLM clear blocks that change hands: rows may be NaN when read as scales, and codes
        # may be NaN when read as rows.
        if has_budget or has_windows or self.spec is not base.FullAttentionSpec:
            stored = replace(stored, dtype=torch.uint8)
        if not has_windows:
            return stored
        # vLLM pads blocks to the bytes of the largest. So a block gets enough tokens to be larger
        # than one of a layer with a window.
        more = -(-spec.page_size_bytes // stored.page_size_bytes)
        return replace(stored, block_size=more * spec.block_size)

    def do_kv_cache_update(self, *_: Any) -> None:
        """Do nothing: `forward` stores new tokens. vLLM's CPU backend would overwrite the codes."""

    @torch.no_grad()
    def forward(  # noqa: PLR0913 (vLLM's own arguments)
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RotatedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new `key` and `value` `[T, H, D]`, and attend with their queries `[T, H_q, D]`."""
        if attn_metadata is None:  # the run that measures memory
            self._reserve(key)
            return output.zero_()
        tokens, step = attn_metadata.num_actual_tokens, attn_metadata.step
        rows = dict(zip(SIDES, (key[:tokens], value[:tokens]), strict=True))
        into = output[:tokens].view(tokens, self.num_heads, self.head_size)
        self.find_reader(rows, kv_cache).run(step, query[:tokens], rows, self.scores, into)
        return output

    def find_reader(self, rows: Rows, kv_cache: torch.Tensor) -> LayerReader:
        """What reads these blocks, which have rows like these."""
        kv_cache = split_blocks(kv_cache, self.num_kv_heads)
        # To measure the memory of graphs, vLLM runs with a small tensor first.
        if self.reader is None or not self.reader.pages.holds(kv_cache):
            self.reserved = self.reader = None
            self.reader = self._open_pages(rows, kv_cache)
        return self.reader

    def _reserve(self, like: torch.Tensor) -> None:
        """On a GPU, allocate what exact copies and prompts will take, for vLLM to account for."""
        is_first = self.reserved is None and self.reader is None
        if like.is_cuda and is_first and self.config.cache_config.block_size:
            tokens = page_tokens(self.config.cache_config.block_size)
            slots = count_slots(self.settings.layout, tokens, *self.most_requests)
            self.reserved = like.new_empty(2, slots, self.num_kv_heads, tokens, self.head_size)
            self._reserve_scratch(like)

    def _reserve_scratch(self, like: torch.Tensor) -> None:
        windows = self.settings.layout.sink + self.settings.layout.recent
        room = max(self.attention.segment, self.max_tokens + windows)
        queries = self.max_tokens, self.num_heads, self.query_size
        rows = room, self.num_kv_heads, self.head_size
        sizes = scratch_sizes(queries, rows, like.dtype, self.value_size)
        base.current_workspace_manager().get_simultaneous(*sizes)

    def own_settings(self) -> CacheSettings:
        first = base.get_tensor_model_parallel_rank() * self.num_kv_heads
        return serving.select_heads(self.settings, slice(first, first + self.num_kv_heads))

    def _open_pages(self, rows: Rows, kv_cache: torch.Tensor) -> LayerReader:
        by_head = (rows[side].transpose(0, 1)[None] for side in SIDES)
        settings, dtype = self.own_settings().for_layer(self.layer, *by_head), rows["key"].dtype
        slots = count_slots(settings.layout, kv_cache.shape[2], *self.most_requests)
        pages = LayerPages(settings, self.layer, kv_cache, slots, dtype, self.bad)
        return LayerReader(pages, self.attention, lend_scratch if rows["key"].is_cuda else None)


class RotatedBackend(base.AttentionBackend):  # type: ignore[misc]
    """The backend of a GPU, chosen for layers with full attention."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | base.MultipleOf]:
        """Multiples of a kernel's tile; vLLM takes the smallest."""
        return [base.MultipleOf(64)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[base.KVCacheLayout, ...]:
        """The layout with contiguous pages."""
        return (base.KVCacheLayout.LBHNC,)

    @classmethod
    def get_impl_cls(cls) -> type[base.AttentionImpl]:
        return RotatedImpl

    @staticmethod
    def get_builder_cls() -> type[base.AttentionMetadataBuilder]:
        return RotatedBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        return True


lend_scratch = lru_cache(1)(
    lambda *sizes: base.current_workspace_manager().get_simultaneous(*sizes)
)  # which all layers of a step share


def _load_drafter(config: Any, load: Callable[..., Any], *arguments: Any) -> Any:
    """Load a model that drafts tokens as if no artifact were named."""
    chosen = {"backend": config.speculative_config.attention_backend, "backend_per_kind": {}}
    own = {"additional_config": {}, "attention_config": replace(config.attention_config, **chosen)}
    base.AttentionBackendEnum.CPU_ATTN.clear_override()
    base._cached_get_attn_backend.cache_clear()
    parallel = config.parallel_config
    with patch.multiple(config, **own), patch.object(parallel, "worker_cls", _WORKER):
        return load(*arguments)


_WORKER = base.worker_path()
_Worker: Any = resolve_name(_WORKER)


class RotatedWorker(_Worker):  # type: ignore[misc]
    """vLLM's own worker, for a config that names an artifact."""

    def load_model(self, **options: Any) -> None:
        """Raises `RotationZooError` for what is not served, and for a layer with an exact cache."""
        config = self.vllm_config
        claim(config)
        settings = serving.read_settings(config)
        # vLLM's CPU platform takes no other backends than these, but looks up their classes here.
        backend, *places = CPU_BACKENDS[cached := settings.codec.rotations.cached]
        for place in places:
            base.register_backend(base.AttentionBackendEnum[place], backend)
        if cached is LATENTS:
            base.register_backend(base.AttentionBackendEnum.CUSTOM, GPU_LATENTS)
        runner = self.model_runner
        # vLLM has two versions of runners.
        drafter: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        if config.speculative_config is not None and hasattr(drafter, "load_model"):
            drafter.load_model = partial(_load_drafter, config, drafter.load_model)
        try:
            super().load_model(**options)
        finally:
            for place in places:
                base.AttentionBackendEnum[place].clear_override()
            if cached is LATENTS:
                base.register_backend(base.AttentionBackendEnum.CUSTOM, GPU_HEADS)
            base._cached_get_attn_backend.cache_clear()  # other models of this process keep vLLM's
        layers = config.compilation_config.static_forward_context
        self.stored = {}
        for name, layer in layers.items():
            if isinstance(getattr(layer, "impl", None), RotatedImpl):
                number = layer.impl.layer = base.extract_layer_index(name)
                self.stored[number] = name
                layer.attn_backend = layer.impl.make_backend(layer.attn_backend, number)
        if exact := serving.served_layers(settings, config) - set(self.stored):
            raise RotationZooError(f"vLLM gave layer {min(exact)} an exact attention backend")
        self.bad_rows = BadRows(self.stored, self.device, settings.codec.rotations.cached.names)
        for name, bad in zip(self.stored.values(), self.bad_rows.counted, strict=True):
            layers[name].impl.bad = bad

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Raises `RotationZooError` for pages that fail the self-check."""
        super().initialize_from_config(kv_cache_config)
        self.leaders: list[RotatedBuilder] = []
        for groups in self.model_runner.attn_groups:
            several = [each.metadata_builders for each in groups]
            for builders in zip(*several, strict=True):
                own = [each for each in builders if isinstance(each, RotatedBuilder)]
                self.leaders += own[:1]
                for builder in own:
                    builder.leader = own[0]
        for group in kv_cache_config.kv_cache_groups:
            size = group.kv_cache_spec.block_size
            self.bad_rows.block_sizes |= dict.fromkeys(group.layer_names, size)
        from rotationzoo.vllm.self_check import check_pages  # not needed later

        furthest = check_pages(self.vllm_config, self.stored, kv_cache_config)
        self.metrics = [Metrics(self, each.planner, furthest) for each in self.leaders[:1]]

    def sleep(self, level: int = 1) -> None:
        """Raises `UnsupportedModel` for a level after which weights may be others."""
        if level > 1:
            problem = "rotations are not served with a sleep of level 2, which drops the weights"
            raise UnsupportedModel(problem, "sleep with level 1, which keeps them")
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Clear the pages that come back with any content."""
        super().wake_up(tags)
        if tags is None or "kv_cache" in tags:
            layers = self.vllm_config.compilation_config.static_forward_context
            for name in self.stored.values():
                layers[name].kv_cache.zero_()

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *others: Any) -> Any:
        """Run a step, and log requests whose keys or values are not finite. Blocks that a KV
        connector loads lose the exact copies of their former tokens before the step is planned."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        meets = may_meet(scheduler_output, [each.kv_cache_spec.block_size for each in groups])
        loaded = getattr(scheduler_output.kv_connector_metadata, "loaded_blocks", None)
        for builder in self.leaders:
            builder.meets = meets
            if loaded:
                builder.forget(loaded)
        self.bad_rows.note_blocks(scheduler_output)
        output = super().execute_model(scheduler_output, *others)
        self.bad_rows.look()
        for metrics in self.metrics:
            metrics.follow(not scheduler_output.total_num_scheduled_tokens)
        return output
