"""What a server is asked for beside an artifact: whether our backend serves it, and what people
should know of it. It is checked once, where vLLM makes a config."""

from itertools import product
from typing import Any

from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import UnsupportedModel
from rotationzoo.figures import byte_count
from rotationzoo.geometry import full_attention_layers
from rotationzoo.rotations import SIDES
from rotationzoo.vllm import BACKENDS, KEY, WORKER
from rotationzoo.vllm.settings import served_layers
from rotationzoo.vllm.steps import count_slots


def check_server(config: Any) -> None:
    """Raise `UnsupportedModel` for what vLLM is asked for, and this backend does not serve."""
    from vllm.envs import VLLM_PLUGINS
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    attention, place, known = config.attention_config, Backends.CUSTOM, {Backends.CUSTOM}
    if config.device_config.device_type == "cpu":  # which has one backend, whatever it is asked for
        place, known = Backends.CPU_ATTN, {None, Backends.CPU_ATTN, Backends.CUSTOM}
    backend = attention.backend_per_kind.get("full_attention", attention.backend)
    # CUSTOM has no path as long as no plugin gave it one.
    path = place.get_path() if place.is_overridden() else BACKENDS
    heads = model.get_total_num_kv_heads()
    changed = ", ".join(_changed_keys(model))
    has_windows = full_attention_layers(model.hf_config) is not None
    unserved = {
        "processes that share KV heads": heads % parallel.tensor_parallel_size,
        "microbatches": parallel.use_ubatching,
        # It fills pages that this backend has not written.
        "a KV connector": config.kv_transfer_config is not None,
        "KV offloading": cache.kv_offloading_size is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "sliding windows beside states": model.is_hybrid and has_windows,
        # vLLM would copy such a block, and not know of the exact copies of its pages.
        "prefixes that end inside a block": getattr(cache, "prefix_match_unit", None) is not None,
        "speculative decoding": config.speculative_config is not None,
        "a KV cache dtype of vLLM's own": cache.cache_dtype not in ("auto", "bfloat16"),
        "layers left out": getattr(cache, "kv_cache_dtype_skip_layers", None),
        "random weights (--load-format dummy)": config.load_config.load_format == "dummy",
        "weights that change meanwhile": config.weight_transfer_config is not None,
        f"another config than the model's own ({changed})": changed,
        "another worker of vLLM": not parallel.worker_cls.startswith(("vllm.v1.worker.", WORKER)),
        "another attention backend than CUSTOM": backend not in known,
        f"{path}, which another plugin put in our backend's place": not path.startswith(BACKENDS),
        "a VLLM_PLUGINS that leaves rotationzoo out": KEY not in (VLLM_PLUGINS or [KEY]),
    }
    for what, asked in unserved.items():
        if asked:
            raise UnsupportedModel(f"rotations are not served with {what}", hint="leave it out")


def describe(settings: CacheSettings, config: Any) -> list[str]:
    """What people should know of a server."""
    codec, layout, requests = settings.codec, settings.layout, config.scheduler_config.max_num_seqs
    layers, tokens = served_layers(settings, config), 64
    if not layers:
        return ["Every layer has a sliding window, which vLLM keeps exact: nothing has 2 bits"]
    pages = [codec.page_layout(*each, tokens, layout.format) for each in product(layers, SIDES)]
    elements = count_slots(layout, tokens, requests) * sum(each.heads * each.dim for each in pages)
    copies = byte_count(tokens * elements * config.model_config.dtype.itemsize)
    notes = [
        f"Serving codes written by {codec.rounding} rounding, the first {layout.sink} and the last "
        f"{layout.recent} tokens exact, which takes {copies} for {requests} requests at a time "
        "(--max-num-seqs)"
    ]
    if config.lora_config is not None:
        notes.append("Rotations were made without the adapters of --enable-lora, which change keys")
    return notes


def _changed_keys(model: Any) -> list[str]:
    """What vLLM's options change in the config that a model comes with."""
    if not (model.hf_overrides or model.hf_config_path):
        return []
    from vllm.transformers_utils.config import get_config

    # vLLM completes both in the same way.
    read = get_config(model.model, model.trust_remote_code, model.revision, model.code_revision)
    kept, used = read.to_dict(), model.hf_config.to_dict()
    return [key for key in kept | used if kept.get(key) != used.get(key) and key != "_name_or_path"]
