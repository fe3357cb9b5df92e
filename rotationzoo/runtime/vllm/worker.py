"""The worker of vLLM that builds a model with our backend, and ends the server where a layer got
another one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from rotationzoo.errors import RotationZooError
from rotationzoo.runtime.vllm import BACKENDS
from rotationzoo.runtime.vllm.backend import RotatedImpl
from rotationzoo.runtime.vllm.plugin import claim
from rotationzoo.runtime.vllm.settings import read_settings, served_layers

_logger = init_logger("vllm.rotationzoo")
_OF_PLATFORM = "cpu_worker.CPUWorker" if current_platform.is_cpu() else "gpu_worker.Worker"
_Worker: Any = resolve_obj_by_qualname(f"vllm.v1.worker.{_OF_PLATFORM}")


class RotatedWorker(_Worker):  # type: ignore[misc]
    """vLLM's own worker, for a config that names an artifact."""

    def load_model(self, **options: Any) -> None:
        """Raises `RotationZooError` for what is not served, before weights are read, and for a
        layer whose cache would be exact."""
        config = self.vllm_config
        claim(config)
        with _backend_of_cpus():
            super().load_model(**options)
        settings, layers = read_settings(config), get_layers_from_vllm_config(config, Attention)
        assert settings is not None
        ours = {name for name, layer in layers.items() if isinstance(layer.impl, RotatedImpl)}
        exact = served_layers(settings, config).difference(map(extract_layer_index, ours))
        if exact:
            raise RotationZooError(
                f"layer {min(exact)} reads an exact cache: vLLM gave it another attention backend"
            )
        _logger.info("rotationzoo: %d of %d layers are stored in 2 bits", len(ours), len(layers))


@contextmanager
def _backend_of_cpus() -> Iterator[None]:
    """Put our backend in the place of vLLM's for CPUs, whose platform ignores every other choice,
    while a model is built: another model of this process keeps vLLM's."""
    place = AttentionBackendEnum.CPU_ATTN
    _cached_get_attn_backend.cache_clear()
    register_backend(place, f"{BACKENDS}.RotatedCpuBackend")
    try:
        yield
    finally:
        place.clear_override()
        _cached_get_attn_backend.cache_clear()
