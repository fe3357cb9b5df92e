"""The attention backend of vLLM's CPU engine, with keys and values in 2 bits.

A `VllmConfig` whose `additional_config` names no artifact gets vLLM's own backend, unchanged.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rotationzoo.errors import UnsupportedModel
from rotationzoo.rotations import SIDES
from rotationzoo.runtime.settings import CacheSettings
from rotationzoo.runtime.vllm.pages import NewTokens, Pages, attend
from rotationzoo.runtime.vllm.settings import cell_bytes, read_settings


class RotatedImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The attention of one layer over pages of codes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config = get_current_vllm_config_or_none()
        self.settings = read_settings(config)
        self.most_requests = config.scheduler_config.max_num_seqs
        self.pages: Pages | None = None

    def do_kv_cache_update(self, *_: Any) -> None:
        """Nothing: vLLM's own would write rows as they are over the codes. `forward` stores new
        tokens, because it knows which request they are of."""

    @torch.no_grad()
    def forward(  # noqa: PLR0913 (vLLM's own arguments)
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Store the new tokens of all requests, `key` and `value` `[T, H, D]`, and write what their
        queries `[T, H_q, D]` read to `output`."""
        if attn_metadata is None:  # the run that measures memory
            return output.zero_()
        if self.pages is None:
            assert self.settings is not None
            index = extract_layer_index(layer.layer_name)
            self.pages = Pages(self.settings, index, self.most_requests)
        bounds, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        rows = dict(zip(SIDES, (key, value), strict=True))
        tokens = kv_cache.shape[2]
        for request, length in enumerate(lengths):
            part = slice(bounds[request], bounds[request + 1])
            pages = attn_metadata.block_table[request, : -(-length // tokens)].long()
            new = NewTokens({side: each[part] for side, each in rows.items()}, pages, length)
            self.pages.write(kv_cache, new)
            read = self.pages.read(kv_cache, new)
            attended = attend(query[part], read, self.scale, self.logits_soft_cap, self.sinks)
            output[part] = attended.view_as(output[part])
        return output


class RotatedBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend for CPUs, or this one where an artifact is named."""

    settings: CacheSettings | None = None
    """The settings of the model that this process serves, as its layers are built: vLLM asks for
    the spec of a cache later, when it shows its configuration no more."""

    @classmethod
    def get_impl_cls(cls) -> type[CPUAttentionBackendImpl]:
        """The class of a layer's attention."""
        config = get_current_vllm_config_or_none()
        if config is not None:
            RotatedBackend.settings = read_settings(config)
        return CPUAttentionBackendImpl if cls.settings is None else RotatedImpl

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The spec of a layer's cache, with the bytes that a token of a KV head takes in 2 bits.
        Raises `UnsupportedModel` for a layer that is not of full attention."""
        if cls.settings is None or spec.state_content_bytes is not None:
            return super().customize_spec(spec)
        if type(spec) is not FullAttentionSpec or spec.sliding_window is not None:
            raise UnsupportedModel(
                "this backend serves layers with full attention alone, and the model has others",
                hint="read it with transformers: rotationzoo generate",
            )
        return replace(spec, state_content_bytes=cell_bytes(cls.settings, spec.head_size))
