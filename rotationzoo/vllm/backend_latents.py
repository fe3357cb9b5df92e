"""Our attention backend in the place of vLLM's own for latents (MLA).

What vLLM 0.32 does with latents (MLA), in `model_executor/layers/attention/mla_attention.py`:

* The CPU platform has two backends, `AMX_MLA` and, without AMX, `CPU_MLA`, and looks up their
  classes in the registry. `CPU_MLA` takes blocks of 16 tokens, whole prompts and no prefix caching.
* A layer's cache is one head of 512 + 64, an `MLAAttentionSpec`, without an axis of heads.
* New rows come in `do_kv_cache_update`, their queries in a second call. `forward_impl` takes the
  first `num_decode_tokens` queries to the frame of latents (`W_UK_T`), calls `forward_mqa`, and
  takes its output to values (`W_UV`). Other queries would go to `forward_mha`: we have none.
* RoPE of queries `[T, heads, D]` is wrong in vLLM's CPU kernel, which `plugin.claim` turns off.
"""

from typing import Any

import torch

from rotationzoo.codec.settings import CacheSettings
from rotationzoo.vllm import upstream as base
from rotationzoo.vllm.backend import (
    RotatedBackend,
    RotatedBuilder,
    RotatedImpl,
    RotatedMetadata,
    lend_scratch,
)
from rotationzoo.vllm.flash_attention import choose_latent_attention
from rotationzoo.vllm.latents import LatentPages, LatentReader
from rotationzoo.vllm.prompts import LayerReader, scratch_sizes
from rotationzoo.vllm.steps import count_slots

PAGE = 64  # tokens, on a GPU


class LatentMetadata(RotatedMetadata):
    """What the layers of a step get: all tokens count as decodes."""

    num_decodes = 1
    num_prefills = 0
    prefill = None

    @property
    def num_decode_tokens(self) -> int:
        return self.num_actual_tokens

    @property
    def decode(self) -> Any:
        """`forward_impl` only compares it with None."""
        return self.step


class LatentBuilder(RotatedBuilder):
    """Plans each step for all layers."""

    def _plan(self, common: Any) -> LatentMetadata:
        planned = super()._plan(common)
        return LatentMetadata(planned.num_actual_tokens, planned.step)


class LatentImpl(RotatedImpl):
    """The attention of one layer over pages of latents."""

    builder = LatentBuilder
    spec = base.MLAAttentionSpec

    def __init__(self, *given: Any, kv_lora_rank: int, **others: Any) -> None:
        own = {"q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"}
        own |= {"kv_b_proj", "indexer"}
        super().__init__(*given, **{name: others[name] for name in others if name not in own})
        self.value_size, rope = kv_lora_rank, self.head_size - kv_lora_rank
        dtype, device = self.config.model_config.dtype, self.config.device_config.device_type
        self.attention = choose_latent_attention(kv_lora_rank, rope, dtype, device == "cuda")
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Reserve memory before vLLM measures: its run for that does not come to our layers."""
        device = self.config.device_config.device
        self._reserve(torch.empty(0, dtype=act_dtype, device=device))

    def _reserve(self, like: torch.Tensor) -> None:
        if not like.is_cuda or self.reserved is not None:
            return
        windows = self.settings.layout.sink + self.settings.layout.recent
        slots = count_slots(self.settings.layout, PAGE, *self.most_requests)
        self.reserved = like.new_empty(slots, PAGE, self.head_size)
        room = max(self.attention.segment, self.max_tokens + windows)
        queries = self.max_tokens, self.num_heads, self.head_size
        lend_scratch(*scratch_sizes(queries, 1, room, like.dtype, self.value_size))

    def do_kv_cache_update(self, latents: torch.Tensor, rope: torch.Tensor, *_: Any) -> None:
        """Keep new rows `[T, R]` and `[T, 1, rope channels]` until `forward_mqa` stores them."""
        self._new = latents[:, None], rope

    def forward_mqa(
        self, query: Any, kv_cache: torch.Tensor, attn_metadata: LatentMetadata, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Store the new rows, and return the attention output `[T, H_q, R]` of their queries
        `[T, H_q, R]` and `[T, H_q, rope channels]`."""
        assert self._new is not None
        latents, rope = (rows[: len(query[0])] for rows in self._new)
        queries, key, self._new = torch.cat(query, -1), torch.cat([latents, rope], -1), None
        output = torch.empty_like(query[0])
        return self.forward(layer, queries, key, latents, kv_cache, attn_metadata, output), None

    def own_settings(self) -> CacheSettings:
        """Those of all processes, each of which holds all latents."""
        return self.settings

    def _open_pages(
        self, index: int, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> LayerReader:
        latents, keys = (each.transpose(0, 1)[None] for each in (value, key))
        self.reserved = self.reader = None
        settings = self.own_settings().for_layer(index, latents, keys)
        slots = count_slots(settings.layout, kv_cache.shape[2], *self.most_requests)
        pages = LatentPages(settings, index, kv_cache, slots, key.dtype, self.bad)
        return LatentReader(pages, self.attention, lend_scratch if key.is_cuda else None)


class LatentBackend(RotatedBackend):
    """Ours, in the places of vLLM's for latents on a CPU."""

    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | base.MultipleOf]:
        """Any that a CPU takes."""
        return [base.MultipleOf(16)]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def get_impl_cls(cls) -> Any:
        return LatentImpl


class LatentGpuBackend(LatentBackend):
    """Ours for latents on a GPU, chosen as `CUSTOM`."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | base.MultipleOf]:
        """Pages of the kernels."""
        return [base.MultipleOf(PAGE)]
