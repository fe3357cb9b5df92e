"""Our attention backend in the place of vLLM's own for CPUs, which has one for all layers."""

from inspect import signature
from typing import Any

from rotationzoo.vllm.backend import RotatedBuilder, RotatedImpl, in_two_bits
from rotationzoo.vllm.upstream import CPUAttentionBackend, SlidingWindowSpec


class CpuBuilder(RotatedBuilder):
    """Ours, or vLLM's for layers with a sliding window: a CPU has one backend for all layers."""

    def __new__(cls, kv_cache_spec: Any, *others: Any) -> Any:
        if kv_cache_spec.state_content_bytes is None:
            return CPUAttentionBackend.get_builder_cls()(kv_cache_spec, *others)
        return super().__new__(cls)


class CpuImpl(RotatedImpl):
    """Ours, or vLLM's for layers with a sliding window."""

    def __new__(cls, *arguments: Any, **others: Any) -> Any:
        asked = signature(RotatedImpl.__init__).bind(None, *arguments, **others).arguments
        if asked.get("sliding_window") is not None:
            return CPUAttentionBackend.get_impl_cls()(*arguments, **others)
        return super().__new__(cls)


class RotatedCpuBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Ours, in the place of vLLM's for CPUs."""

    layer: int | None = None
    """As in `RotatedBackend`."""

    @classmethod
    def get_impl_cls(cls) -> Any:
        """The class of a layer's attention."""
        return CpuImpl

    @classmethod
    def get_builder_cls(cls) -> Any:
        """The class that plans steps."""
        return CpuBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The spec of a layer's cache, with the bytes that a token of a KV head takes in 2 bits."""
        if isinstance(spec, SlidingWindowSpec):
            return super().customize_spec(spec)
        return in_two_bits(spec, cls.layer)
