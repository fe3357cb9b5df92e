"""The options of vLLM that are refused with an artifact, and notes on those that are served."""

from itertools import product
from typing import Any

from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import UnsupportedModel
from rotationzoo.geometry import full_attention_layers
from rotationzoo.recipe.rope import apply_scaling, scaling_of
from rotationzoo.sides import LATENTS
from rotationzoo.vllm import BACKENDS, CONNECTORS, KEY, WORKER
from rotationzoo.vllm.settings import parse_options, served_layers, verified_tokens
from rotationzoo.vllm.steps import count_slots
from rotationzoo.vllm.upstream import WORKERS
from rotationzoo.words import byte_count

SERVED_CONNECTORS = "OffloadingConnector", "SimpleCPUOffloadConnector", "NixlConnector"
"""vLLM's KV connectors whose pages come from this server, or from one that names its artifact."""
_CONNECTOR_OPTIONS = {"cpu_bytes_to_use", "backends", "num_threads"}
"""Other options of these connectors keep pages in files, or compare less."""


def check_server(settings: CacheSettings, config: Any) -> None:
    """Raise `UnsupportedModel` for options of vLLM that this backend does not serve."""
    from rotationzoo.vllm.upstream import VLLM_PLUGINS, current_platform
    from rotationzoo.vllm.upstream import AttentionBackendEnum as Backends

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    attention, place, known = config.attention_config, Backends.CUSTOM, {Backends.CUSTOM}
    on_gpu, cached = config.device_config.device_type != "cpu", settings.codec.rotations.cached
    if not on_gpu:  # a CPU has one backend, whatever the options
        place, known = Backends.CPU_ATTN, {None, Backends.CPU_ATTN, Backends.CUSTOM}
    backend = attention.backend_per_kind.get("full_attention", attention.backend)
    # CUSTOM has no path until a plugin sets one.
    path = place.get_path() if place.is_overridden() else BACKENDS
    heads = model.get_total_num_kv_heads()
    changed = ", ".join(_changed_keys(config))
    copies = _copied_bytes(settings, config)
    memory = cache.gpu_memory_utilization * current_platform.get_device_total_memory()
    has_windows = full_attention_layers(model.hf_config) is not None
    connector = _unserved_connector(config)
    connects, has_latents = _has_connector(config), cached is LATENTS
    drafts = config.speculative_config is not None
    method = drafts and config.speculative_config.method
    ngrams = method == "ngram"
    latent_drafts = {False, "ngram", "draft_model"}
    if on_gpu:  # vLLM's CPU engine has no block size for both
        latent_drafts.add("mtp")
    untested = model.is_hybrid or drafts > ngrams or parallel.tensor_parallel_size > 1
    if has_latents and not model.use_mla:
        problem = "with VLLM_MLA_DISABLE, vLLM caches no latents, and the rotations are for latents"
        raise UnsupportedModel(problem, hint="unset the variable")
    check_latents(model.hf_config)
    unserved = {
        "processes that share KV heads": (
            not has_latents and heads % parallel.tensor_parallel_size
        ),
        "microbatches": parallel.use_ubatching,
        # Pages of another server may be from another artifact, which nothing compares.
        f"this KV connector ({connector})": connector,
        "a KV connector with sliding windows, states, tensor parallelism, or drafts but n-grams": (
            connects and (untested or has_windows)
        ),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        # Processes that hold all latents would each hold some of a request's tokens.
        "context parallelism": (
            parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size > 1
        ),
        "latents with states or a KV connector": has_latents and (model.is_hybrid or connects),
        "latents with drafts but n-grams, those of a draft model, and MTP on a GPU": (
            has_latents and method not in latent_drafts
        ),
        "sliding windows with states": model.is_hybrid and has_windows,
        # With its own cache, too, vLLM's CPU engine answers these wrongly.
        "drafts and states on a CPU": drafts and model.is_hybrid and not on_gpu,
        # vLLM would copy such a block without the exact copies of its pages.
        "prefixes that end inside a block": getattr(cache, "prefix_match_unit", None) is not None,
        "a KV cache dtype of vLLM's own": cache.cache_dtype not in ("auto", "bfloat16"),
        "layers with another cache dtype": getattr(cache, "kv_cache_dtype_skip_layers", None),
        # A connector knows where pages were.
        "sleep mode and a KV connector": connects and model.enable_sleep_mode,
        f"exact copies of {byte_count(copies)} (--max-num-seqs)": copies > memory,
        "random weights (--load-format dummy)": config.load_config.load_format == "dummy",
        "weights that change while it runs": config.weight_transfer_config is not None,
        f"a config other than the model's own ({changed})": changed,
        "another worker class": not parallel.worker_cls.startswith((WORKERS, WORKER)),
        "an attention backend other than CUSTOM": backend not in known,
        f"{path}, which another plugin put in our backend's place": not path.startswith(BACKENDS),
        "a VLLM_PLUGINS that leaves rotationzoo out": KEY not in (VLLM_PLUGINS or [KEY]),
    }
    for what, asked in unserved.items():
        if asked:
            raise UnsupportedModel(f"rotations are not served with {what}", hint="leave it out")


def check_latents(config: Any) -> None:
    """Raise `UnsupportedModel` for a model that reads its latents (MLA) sparsely."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) and getattr(text, "index_topk", None) is not None:
        problem = "rotations are not served with sparse attention over latents (MLA)"
        raise UnsupportedModel(problem, "read them with transformers: rotationzoo generate MODEL")


def describe(settings: CacheSettings, config: Any) -> list[str]:
    """What users should know about a server."""
    layout, requests = settings.layout, config.scheduler_config.max_num_seqs
    if not served_layers(settings, config):
        return ["Every layer has a sliding window, which vLLM keeps exact: nothing is in 2 bits"]
    copies = byte_count(_copied_bytes(settings, config))
    how = {"transform": "transform coding", "nearest": "nearest codes"}[settings.codec.rounding]
    quantization = config.model_config.quantization
    notes = {
        f"Serving {how}, the first {layout.sink} and the last "
        f"{layout.recent} tokens exact, which takes {copies} for {requests} requests at a time "
        "(--max-num-seqs)": True,
        f"Weights are quantized ({quantization}): rotations were made for these, or for the "
        "weights that they were quantized from": quantization,
        "Pages that a KV connector loads have no exact copies: they are read from codes, even "
        "the first tokens of a request": _has_connector(config),
        "Rotations were made without the adapters of --enable-lora, which change keys": (
            config.lora_config is not None
        ),
    }
    return [note for note, is_true in notes.items() if is_true]


def name_connector(config: Any) -> None:
    """Let vLLM take its KV connector, if any, from our module."""
    if _has_connector(config):
        from rotationzoo.vllm.upstream import KVTransferConfig

        # For offloading, vLLM adds the connector's name later.
        config.kv_transfer_config = config.kv_transfer_config or KVTransferConfig()
        config.kv_transfer_config.kv_connector_module_path = CONNECTORS


def _has_connector(config: Any) -> bool:
    offloads = config.cache_config.kv_offloading_size is not None
    return offloads or config.kv_transfer_config is not None


def _unserved_connector(config: Any) -> str:
    """What is not served of a KV connector: its name, or its options; otherwise empty."""
    cache, transfer = config.cache_config, config.kv_transfer_config
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend != "native":
        return str(cache.kv_offloading_backend)
    if transfer is None:
        return ""
    path, name = transfer.kv_connector_module_path, transfer.kv_connector
    others = sorted({*transfer.kv_connector_extra_config} - _CONNECTOR_OPTIONS)
    if path not in (None, CONNECTORS) or name not in (None, *SERVED_CONNECTORS):
        return str(name)
    return ", ".join(others)


def _copied_bytes(settings: CacheSettings, config: Any) -> int:
    """The bytes of the exact copies of all requests."""
    codec, layout, tokens = settings.codec, settings.layout, 64
    layers, cached = served_layers(settings, config), codec.rotations.cached
    sides = product(layers, cached.sides)
    pages = [codec.page_layout(*each, tokens, layout.format) for each in sides]
    requests = config.scheduler_config.max_num_seqs
    slots = count_slots(layout, tokens, requests, verified_tokens(config))
    elements = sum(each.heads * each.dim for each in pages)
    if cached is LATENTS:
        text = config.model_config.hf_config.get_text_config(decoder=True)
        elements += len(layers) * text.qk_rope_head_dim
    return int(elements * slots * tokens * config.model_config.dtype.itemsize)


def _changed_keys(config: Any) -> list[str]:
    """The keys of the model's config that vLLM's options change, except for RoPE that is scaled as
    in calibration. Raises `UnsupportedModel` for RoPE that is not."""
    model, options = config.model_config, parse_options(config.additional_config)
    wanted = options.open().recipe.rope_scaling
    if not (model.hf_overrides or model.hf_config_path or wanted):
        return []
    from rotationzoo.vllm.upstream import get_config

    # vLLM completes both in the same way.
    read = get_config(model.model, model.trust_remote_code, model.revision, model.code_revision)
    kept, used = read.to_dict(), model.hf_config.to_dict()
    fixed = {"_name_or_path"}
    if str(scaling_of(model.hf_config)).startswith("yarn:"):
        fixed.add("max_position_embeddings")  # which YaRN does not use
    if wanted:
        present = scaling_of(model.hf_config)
        apply_scaling(read, wanted, model.model)
        if scaling_of(read) != present:
            raise UnsupportedModel(
                f"rotations were calibrated with the rope scaling {wanted}, and the server runs "
                f"with {present or 'none'}",
                hint="leave --hf-overrides to: rotationzoo serve",
            )
        fixed.add("rope_parameters")
    return [key for key in kept | used if kept.get(key) != used.get(key) and key not in fixed]
