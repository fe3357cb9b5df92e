"""All that this package takes from vLLM. No other module here imports vLLM.

vLLM promises none of these names: a version that was never run is compared with them first.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

NAMES = {
    "vllm.config": "KVTransferConfig get_current_vllm_config",
    "vllm.distributed.kv_transfer.kv_connector.factory": "KVConnectorFactory",
    "vllm.distributed.parallel_state": "get_tensor_model_parallel_rank",
    "vllm.engine.arg_utils": "AsyncEngineArgs",
    "vllm.entrypoints.common.cli_args": "make_arg_parser",
    "vllm.envs": "VLLM_PLUGINS",
    "vllm.model_executor.models.utils": "extract_layer_index",
    "vllm.platforms": "current_platform",
    "vllm.transformers_utils.config": "get_config",
    "vllm.usage.usage_lib": "UsageContext",
    "vllm.utils.argparse_utils": "FlexibleArgumentParser",
    "vllm.v1.attention.backend": (
        "AttentionBackend AttentionCGSupport AttentionImpl AttentionMetadata "
        "AttentionMetadataBuilder CommonAttentionMetadata MultipleOf"
    ),
    "vllm.v1.attention.backends": "fa_utils",
    "vllm.v1.attention.backends.flash_attn": "FlashAttentionBackend",
    "vllm.v1.attention.backends.registry": "AttentionBackendEnum register_backend",
    "vllm.v1.attention.ops.merge_attn_states": "merge_attn_states",
    "vllm.v1.attention.selector": "_cached_get_attn_backend",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheLayout SlidingWindowSpec",
    "vllm.v1.worker.workspace": "current_workspace_manager",
}
"""The names that are imported, by module."""
ON_CPU = {
    "vllm.v1.attention.backends.cpu_attn": "CPUAttentionBackend",
    "vllm.v1.worker.cpu_worker": "CPUWorker",
}
ON_GPU = {"vllm.v1.worker.gpu_worker": "Worker"}
"""Those of one platform alone."""
OLDER = {"vllm.entrypoints.common.cli_args": "vllm.entrypoints.launchers.cli_args"}
"""Where 0.32.0 has a module."""
MEMBERS = {
    "AttentionBackend": (
        "customize_spec forward_includes_kv_cache_update get_builder_cls get_impl_cls get_name "
        "get_supported_kernel_block_sizes supported_dtypes supported_kv_cache_layouts supports_sink"
    ),
    "AttentionBackendEnum": "CPU_ATTN CUSTOM clear_override get_path is_overridden",
    "AttentionCGSupport": "UNIFORM_BATCH",
    "AttentionImpl": "forward process_weights_after_loading",
    "AttentionMetadataBuilder": "_cudagraph_support _init_reorder_batch_threshold build",
    "CPUWorker": "execute_model initialize_from_config load_model",
    "CommonAttentionMetadata": (
        "block_table_tensor max_seq_len num_actual_tokens query_start_loc query_start_loc_cpu "
        "seq_lens seq_lens_cpu_upper_bound slot_mapping"
    ),
    "FlashAttentionBackend": "supports_head_size",
    "FullAttentionSpec": "copy_with_new_block_size page_size_bytes state_content_bytes",
    "KVCacheLayout": "LBHNC",
    "KVConnectorFactory": "get_connector_class_by_name",
    "Worker": "execute_model initialize_from_config load_model",
    "current_platform": "check_and_update_config get_device_total_memory is_cpu",
    "fa_utils": "get_flash_attn_version is_flash_attn_varlen_func_available",
}
"""What is used of these names, or replaced: vLLM calls it of ours."""
CLI, CPU_SERVER = "vllm.entrypoints.cli.main", "vllm.entrypoints.launchers.api_server.entry"
"""The modules that start a server: of both packages, and of the one for CPUs."""
WORKERS = "vllm.v1.worker."
"""What the path of a worker of vLLM's own begins with."""
_MODULES = {
    name: module for module, names in (NAMES | ON_CPU | ON_GPU).items() for name in names.split()
}


def __getattr__(name: str) -> Any:
    """A name of vLLM's, whose module is imported now. Raises `ImportError` where there is none."""
    if name not in _MODULES:
        raise AttributeError(f"{__name__} has no {name}")
    module = _MODULES[name]
    try:
        owner = import_module(module)
    except ModuleNotFoundError:
        if module not in OLDER:
            raise
        owner = import_module(OLDER[module])
    if hasattr(owner, name):
        return getattr(owner, name)
    try:
        return import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        raise ImportError(f"vLLM has no {module}.{name}") from None


def worker_path() -> str:
    """Where vLLM's own worker for this platform stands."""
    of_platform = ON_CPU if __getattr__("current_platform").is_cpu() else ON_GPU
    return f"{[*of_platform][-1]}.{[*of_platform.values()][-1]}"


def missing_names() -> list[str]:
    """What the vLLM on this machine lacks of all that this package needs, with its module. Imports
    all of it."""
    try:
        is_cpu = __getattr__("current_platform").is_cpu()
    except Exception:
        is_cpu = False
    server, of_platform = (CPU_SERVER, ON_CPU) if is_cpu else (CLI, ON_GPU)
    needed, missing = NAMES | of_platform, []
    if not _has_module(server):
        missing.append(server)
    for module, names in needed.items():
        for name in names.split():
            missing += _missing_of(f"{module}.{name}", name)
    return missing


def _missing_of(path: str, name: str) -> list[str]:
    """This name or its members, where they are not there."""
    try:
        found = __getattr__(name)
    except Exception:  # of whatever kind: an import runs code that is not known
        return [path]
    # A field of a data class without a default is no attribute of the class.
    fields = getattr(found, "__dataclass_fields__", {})
    members = MEMBERS.get(name, "").split()
    return [f"{path}.{each}" for each in members if not hasattr(found, each) and each not in fields]


def _has_module(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except ImportError:
        return False
