"""Our attention backend in the place of vLLM's own for latents (MLA).

What vLLM 0.32 does with latents (MLA), in `model_executor/layers/attention/mla_attention.py`:

* The CPU platform has two backends, `AMX_MLA` and, without AMX, `CPU_MLA`, and looks up their
  classes in the registry. `CPU_MLA` takes blocks of 16 tokens, whole prompts and no prefix caching.
* A layer's cache is one head of 512 + 64, an `MLAAttentionSpec`, without an axis of heads.
* New rows come in `do_kv_cache_update`, their queries in a second call. `forward_impl` lets the
  queries after the first `num_decode_tokens` read keys and values of heads, in `forward_mha`. Then
  it takes the first ones to the frame of latents (`W_UK_T`), calls `forward_mqa`, and takes its
  output to values (`W_UV`).
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
from rotationzoo.vllm.flash_attention import choose_attention
from rotationzoo.vllm.latents import LatentPages, LatentReader
from rotationzoo.vllm.pages import Rows
from rotationzoo.vllm.prompts import LayerReader
from rotationzoo.vllm.steps import count_slots

PAGE = 64  # tokens, on a GPU


class LatentMetadata(RotatedMetadata):
    """What the layers of a step get. `forward_impl` compares most of it only with None."""

    num_decodes = num_prefills = 1
    prefill = None

    @property
    def num_decode_tokens(self) -> int:
        return self.step.prompts.token if self.step.prompts else self.num_actual_tokens

    @property
    def decode(self) -> Any:
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

    def __init__(  # noqa: PLR0913 (vLLM's own arguments)
        self,
        *given: Any,
        kv_lora_rank: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        q_lora_rank: Any = None,
        qk_nope_head_dim: Any = None,
        qk_rope_head_dim: Any = None,
        indexer: Any = None,
        **others: Any,
    ) -> None:
        super().__init__(*given, **others)
        self.rank, self.query_size, self.value_size = kv_lora_rank, qk_head_dim, v_head_dim
        self.kv_b_proj = kv_b_proj
        dtype, device = self.config.model_config.dtype, self.config.device_config.device_type
        self.attention = choose_attention(qk_head_dim, dtype, False, device == "cuda")
        # Segments are restored to keys and values of all heads. vLLM reserves memory for what
        # `kv_b_proj` makes of 8 times the longest request, up to 65,536 tokens; keys with RoPE
        # beside it take less than as much again.
        longest = 4 * self.config.model_config.max_model_len
        self.attention.segment = min(self.attention.segment, longest)
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Reserve memory before vLLM measures: its run for that does not come to our layers."""
        device = self.config.device_config.device
        self._reserve(torch.empty(0, dtype=act_dtype, device=device))

    def _reserve(self, like: torch.Tensor) -> None:
        if not like.is_cuda or self.reserved is not None:
            return
        slots = count_slots(self.settings.layout, PAGE, *self.most_requests)
        self.reserved = like.new_empty(slots, PAGE, self.head_size)
        self._reserve_scratch(like)

    def expand(
        self, latents: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[L, H_q, D]` and values `[L, H_q, D_v]` of latents `[L, R]` and exact keys
        `[L, rope channels]`."""
        both = self.kv_b_proj(latents.contiguous())[0].unflatten(-1, (self.num_heads, -1))
        nope, values = both.tensor_split([self.query_size - rope.shape[-1]], -1)
        return torch.cat([nope, rope[:, None].expand(-1, self.num_heads, -1)], -1), values

    def do_kv_cache_update(self, latents: torch.Tensor, rope: torch.Tensor, *_: Any) -> None:
        """Keep new rows `[T, R]` and `[T, 1, rope channels]` until their queries come."""
        self._new = latents[:, None], rope

    def forward_mha(  # noqa: PLR0913 (vLLM's own arguments)
        self,
        query: torch.Tensor,
        latents: torch.Tensor,
        rope: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Store the new rows, and write what the queries `[T, H_q, D]` of prompts read to `output`
        `[T, H_q * D_v]`."""
        reader, rows = self._store(kv_cache, attn_metadata)
        into = output.view(len(query), self.num_heads, self.value_size)
        reader.read_prompts(attn_metadata.step, query, rows, self.scores, into)

    def forward_mqa(
        self, query: Any, kv_cache: torch.Tensor, attn_metadata: LatentMetadata, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Store the new rows, unless `forward_mha` has, and return what the other queries read,
        `[T, H_q, R]`. These are `[T, H_q, R]` and `[T, H_q, rope channels]`."""
        if attn_metadata.step.prompts is None:
            self._store(kv_cache, attn_metadata)
        assert self.reader is not None
        output = torch.empty_like(query[0])
        self.reader.read_decodes(attn_metadata.step, torch.cat(query, -1), self.scores, output)
        return output, None

    def _store(
        self, kv_cache: torch.Tensor, attn_metadata: LatentMetadata
    ) -> tuple[LayerReader, Rows]:
        """Begin to store the new rows, and return them and what reads them."""
        assert self._new is not None
        latents, rope = (rows[: attn_metadata.num_actual_tokens] for rows in self._new)
        rows, self._new = {"key": torch.cat([latents, rope], -1), "value": latents}, None
        reader = self.find_reader(rows, kv_cache)
        return reader, reader.store(attn_metadata.step, rows)

    def own_settings(self) -> CacheSettings:
        """Those of all processes, each of which holds all latents."""
        return self.settings

    def _open_pages(self, rows: Rows, kv_cache: torch.Tensor) -> LayerReader:
        latents, keys = (rows[side].transpose(0, 1)[None] for side in ("value", "key"))
        settings = self.own_settings().for_layer(self.layer, latents, keys)
        slots = count_slots(settings.layout, kv_cache.shape[2], *self.most_requests)
        pages = LatentPages(settings, self.layer, kv_cache, slots, keys.dtype, self.bad)
        lend = lend_scratch if keys.is_cuda else None
        return LatentReader(pages, self.attention, lend, self.expand)


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
