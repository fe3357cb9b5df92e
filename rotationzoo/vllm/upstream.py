"""All that this package takes from vLLM. No other module here imports vLLM.

vLLM promises none of these names, so a newer version is first checked for them.
"""

from importlib import import_module
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
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheLayout MLAAttentionSpec",
    "vllm.v1.worker.workspace": "current_workspace_manager",
}  # names by module
ON_CPU = {
    "vllm.entrypoints.launchers.api_server": "entry",
    "vllm.v1.attention.backends.cpu_attn": "CPUAttentionBackend",
    "vllm.v1.worker.cpu_worker": "CPUWorker",
}
ON_GPU = {"vllm.entrypoints.cli": "main", "vllm.v1.worker.gpu_worker": "Worker"}
"""Those of one platform: the module that starts a server, and the worker."""
OLDER = {"vllm.entrypoints.common.cli_args": "vllm.entrypoints.launchers.cli_args"}  # in 0.32.0
_WORKER = "execute_model initialize_from_config load_model"
MEMBERS = {
    "AttentionBackend": "customize_spec forward_includes_kv_cache_update supports_sink",
    "AttentionBackendEnum": "CPU_ATTN CUSTOM clear_override get_path is_overridden",
    "AttentionImpl": "forward",
    "AttentionMetadataBuilder": "_cudagraph_support _init_reorder_batch_threshold build",
    "CPUWorker": _WORKER,
    "CommonAttentionMetadata": "block_table_tensor seq_lens_cpu_upper_bound slot_mapping",
    "FullAttentionSpec": "copy_with_new_block_size page_size_bytes state_content_bytes",
    "Worker": _WORKER,
    "current_platform": "check_and_update_config get_device_total_memory is_cpu",
}  # members that are used, or that our subclasses override
CLI, CPU_SERVER = "vllm.entrypoints.cli.main", "vllm.entrypoints.launchers.api_server.entry"
WORKERS = "vllm.v1.worker."  # the paths of vLLM's own workers begin with it
_TABLE = NAMES | ON_CPU | ON_GPU
_MODULES = {name: module for module, names in _TABLE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name of vLLM's. Raises `ImportError` if vLLM has none."""
    if name not in _MODULES:
        raise AttributeError(f"{__name__} has no {name}")
    module = _MODULES[name]
    try:
        owner = import_module(module)
    except ModuleNotFoundError:
        owner = import_module(OLDER.get(module, module))
    if hasattr(owner, name):
        return getattr(owner, name)
    try:
        return import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        raise ImportError(f"vLLM has no {module}.{name}") from None


def worker_path() -> str:
    """The path of vLLM's own worker for this platform."""
    name = "CPUWorker" if __getattr__("current_platform").is_cpu() else "Worker"
    return f"{_MODULES[name]}.{name}"


def missing_names() -> list[str]:
    """The paths of names and members that the vLLM on this machine lacks. Imports all of them."""
    try:
        others = ON_GPU if __getattr__("current_platform").is_cpu() else ON_CPU
    except Exception:  # of any kind: an import runs unknown code
        others = ON_CPU
    needed = [name for name, module in _MODULES.items() if module not in others]
    return [path for name in needed for path in _missing_of(f"{_MODULES[name]}.{name}", name)]


def _missing_of(path: str, name: str) -> list[str]:
    """This name or its members, if vLLM lacks them."""
    try:
        found = __getattr__(name)
    except Exception:
        return [path]
    # A dataclass field without a default is no attribute of the class.
    fields, members = getattr(found, "__dataclass_fields__", ()), MEMBERS.get(name, "").split()
    return [f"{path}.{each}" for each in members if not hasattr(found, each) and each not in fields]
