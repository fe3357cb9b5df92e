"""The two names of a model's cache: `past_key_values`, and from transformers 5.24 on `cache`."""

import inspect
from collections.abc import Mapping
from typing import Any


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The argument with which a model's call, and its `generate`, take a cache: `{name: cache}`.

    The model's own signature tells its name, because a model may bring code of its own.
    """
    is_new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if is_new else "past_key_values": cache}


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among the named arguments of a model's call, whose name the caller chose."""
    return arguments.get("cache", arguments.get("past_key_values"))


def returned_cache(output: Any) -> Any:
    """The cache that a model returned; None if it returned none."""
    # The old name warns where there is a new one.
    name = "cache" if hasattr(output, "cache") else "past_key_values"
    return getattr(output, name, None)
