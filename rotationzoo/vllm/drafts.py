"""A model that drafts tokens for a server with rotations: its layers keep vLLM's own backend."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from rotationzoo.vllm.upstream import AttentionBackendEnum, _cached_get_attn_backend


def keep_own_backend(runner: Any, config: Any, worker: str) -> None:
    """Have a runner load its draft model, if it has one, as if no artifact were named. `worker` is
    vLLM's own."""
    # Of runners, there are two versions.
    drafter: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    if hasattr(drafter, "load_model"):
        drafter.load_model = partial(_load, config, worker, drafter.load_model)


def _load(config: Any, worker: str, load: Callable[..., Any], *arguments: Any) -> Any:
    chosen = {"backend": config.speculative_config.attention_backend, "backend_per_kind": {}}
    own = {"additional_config": {}, "attention_config": replace(config.attention_config, **chosen)}
    AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()
    with patch.multiple(config, **own), patch.object(config.parallel_config, "worker_cls", worker):
        return load(*arguments)
