"""vLLM's KV connectors, by their own names (`refusals.name_connector`). Here they report the blocks
that they load, which must not keep the exact copies of former tokens."""

from functools import cache
from typing import Any

from rotationzoo import __version__
from rotationzoo.vllm.refusals import SERVED_CONNECTORS
from rotationzoo.vllm.settings import parse_options, read_settings
from rotationzoo.vllm.upstream import KVConnectorFactory


class SaysWhatItLoads:
    """Wraps a connector of vLLM's: the scheduler sends its workers the blocks of each load."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._block_tokens = [
            each.kv_cache_spec.block_size for each in kv_cache_config.kv_cache_groups
        ]
        self._loaded: list[int] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """As in vLLM. Blocks of tokens that are already here keep their copies."""
        request.held_tokens = num_computed_tokens  # kept only with the request
        own: Any = super()
        return own.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As in vLLM, which calls it once a request has its blocks."""
        if num_external_tokens:
            for tokens, numbers in zip(self._block_tokens, blocks.get_block_ids(), strict=True):
                self._loaded += numbers[request.held_tokens // tokens :]
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As in vLLM, with `loaded_blocks`."""
        message = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        message.loaded_blocks, self._loaded = self._loaded, []
        return message

    def register_kv_caches(self, kv_caches: Any) -> None:
        # Two servers compare a hash before one loads pages of the other: it gets all that decides
        # what the bytes of a block mean, besides what vLLM itself compares.
        worker: Any = getattr(self, "connector_worker", None)
        if hasattr(worker, "backend_name"):
            config = self._vllm_config  # type: ignore[attr-defined]
            options, settings = parse_options(config.additional_config), read_settings(config)
            sizes = config.cache_config.block_size, config.parallel_config.tensor_parallel_size
            stored = f"{options.open().identity} {settings.layout.format} {options.bits} {sizes}"
            worker.backend_name += f" {__version__} {stored}"
        super().register_kv_caches(kv_caches)  # type: ignore[misc]


@cache
def __getattr__(name: str) -> Any:
    if name not in SERVED_CONNECTORS:
        raise AttributeError(f"{__name__} has no {name}")
    own = KVConnectorFactory.get_connector_class_by_name(name)
    return type(name, (SaysWhatItLoads, own), {"__doc__": own.__doc__})
