"""vLLM's FlashAttention, for prompts on a GPU."""

import torch
from torch.nn.functional import pad

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
        (query,), (key, value), result = queries.rows, read.rows, output
        if self.version == 2 and key.shape[-1] > value.shape[-1]:  # it takes equally wide ones
            value = pad(value, (0, key.shape[-1] - value.shape[-1]))
            result = torch.empty_like(query)
        # This kernel of vLLM is only in builds for NVIDIA GPUs.
        _, totals = fa_utils.flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
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
            out=result,
        )
        if result is not output:
            output.copy_(result[..., : output.shape[-1]])
        return Read(output, totals)

    def merge(self, first: Read, second: Read, output: torch.Tensor) -> Read:
        """As in `TorchAttention`."""
        totals = torch.empty_like(first.totals)
        # A part with NaN has no finite log-sum-exp. The kernel would skip it, and hide the NaN.
        for part in (first, second):
            part.totals.nan_to_num_(*[-1e30] * 3)
        merge_attn_states(output, first.output, first.totals, second.output, second.totals, totals)
        return Read(output, totals)
