"""vLLM's FlashAttention, for prompts on a GPU."""

from typing import Any

import torch

from rotationzoo.codec.attention import Scores
from rotationzoo.vllm.prompts import Ragged, Read, TorchAttention
from rotationzoo.vllm.segments import LONG
from rotationzoo.vllm.upstream import FlashAttentionBackend, fa_utils, merge_attn_states


def choose_attention(
    head_size: int, dtype: torch.dtype, has_sinks: bool, is_cuda: bool
) -> TorchAttention:
    """FlashAttention where vLLM has it for such heads, otherwise torch."""
    if not is_cuda or not fa_utils.is_flash_attn_varlen_func_available():
        return TorchAttention()
    version = fa_utils.get_flash_attn_version(head_size=head_size, has_sinks=has_sinks)
    takes = (
        version is not None
        and FlashAttentionBackend.supports_head_size(head_size)
        and dtype in (torch.float16, torch.bfloat16)
        and (version >= 3 or not has_sinks)
    )
    return FlashAttention(version) if takes else TorchAttention()


def choose_latent_attention(
    rank: int, rope: int, dtype: torch.dtype, is_cuda: bool
) -> TorchAttention:
    """The same for latents of `rank` channels with `rope` exact ones behind them."""
    takes = dtype in (torch.float16, torch.bfloat16) and (rank, rope) == (512, 64)
    if is_cuda and takes and fa_utils.flash_attn_supports_mla():
        return LatentAttention(3)
    return TorchAttention()


class FlashAttention(TorchAttention):
    """FlashAttention for all prompts of a step at once: nothing waits for the GPU."""

    segment = LONG

    def __init__(self, version: int):
        self.version = version

    def attend(
        self, queries: Ragged, read: Ragged, scores: Scores, causal: bool, output: torch.Tensor
    ) -> Read:
        """As in `TorchAttention`."""
        sinks = None if scores.sinks is None else scores.sinks.to(output.dtype)
        # This kernel of vLLM is only in builds for NVIDIA GPUs.
        _, totals = fa_utils.flash_attn_varlen_func(
            **self._rows(*queries.rows, *read.rows),
            cu_seqlens_q=queries.bounds,
            cu_seqlens_k=read.bounds,
            max_seqlen_q=queries.longest,
            max_seqlen_k=read.longest,
            softmax_scale=scores.scale,
            causal=causal,
            softcap=scores.soft_cap or 0.0,
            return_softmax_lse=True,
            fa_version=self.version,
            s_aux=sinks,
            out=output,
        )
        return Read(output, totals)

    @staticmethod
    def _rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
        return {"q": query, "k": key, "v": value}

    def merge(self, first: Read, second: Read, output: torch.Tensor) -> Read:
        """As in `TorchAttention`."""
        totals = torch.empty_like(first.totals)
        # A part with NaN has no finite log-sum-exp. The kernel would skip it, and hide the NaN.
        for part in (first, second):
            part.totals.nan_to_num_(*[-1e30] * 3)
        merge_attn_states(output, first.output, first.totals, second.output, second.totals, totals)
        return Read(output, totals)


class LatentAttention(FlashAttention):
    """Of latents: their kernel takes what reads them apart from what reads keys with RoPE."""

    segment = 8192  # torch restores it, in several times its memory

    @staticmethod
    def _rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
        rank = value.shape[-1]
        return {"q": query[..., rank:], "k": key[..., rank:], "v": value, "q_v": query[..., :rank]}
