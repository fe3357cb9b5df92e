"""Our attention backend in the place of vLLM's own for CPUs, which has one for all layers."""

from inspect import signature
from typing import Any

from rotationzoo.vllm import upstream as base
from rotationzoo.vllm.backend import RotatedImpl


def make_impl(*arguments: Any, **others: Any) -> Any:
    """The attention of a layer: ours, or vLLM's for one with a sliding window."""
    asked = signature(RotatedImpl.__init__).bind(None, *arguments, **others).arguments
    has_window = asked.get("sliding_window") is not None
    kind = base.CPUAttentionBackend.get_impl_cls() if has_window else RotatedImpl
    return kind(*arguments, **others)


class RotatedCpuBackend(base.CPUAttentionBackend):  # type: ignore[misc]
    """Ours, in the place of vLLM's for CPUs."""

    @staticmethod
    def get_impl_cls() -> Any:
        return make_impl
