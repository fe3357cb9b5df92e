"""The report of a plan: every number in one table, as JSON has it."""

from typing import Any

from rotationzoo.capacity.cache_bytes import CACHES, elements
from rotationzoo.capacity.cards import CARDS, Card
from rotationzoo.capacity.job import Capacity


def capacity_json(capacity: Capacity) -> dict[str, Any]:
    """The report: sizes in bytes, rates in tokens per second, None where something cannot be."""
    wish, shape = capacity.wish, capacity.shape
    sizes = {cache: capacity.request_bytes(cache) for cache in capacity.caches}
    of_all = dict.fromkeys(CACHES) | sizes
    per_token: dict[str, float | None] = dict.fromkeys(CACHES)
    for cache, size in sizes.items():
        per_token[cache] = size / wish.context
    bits = None
    if not capacity.refusal:
        kept = sizes["int2"] - shape.state_bytes
        bits = kept * 8 / elements(shape, wish.context)
    chosen = card_json(capacity, wish.card)
    states = None if shape.uncounted_states else shape.state_bytes
    sliding = [layer for layer in shape.layers if layer.window is not None]
    return {
        "model": wish.model,
        "revision": capacity.source.revision,
        "context": wish.context,
        "requests": wish.requests,
        "positions": capacity.positions,
        "sink": wish.storage.sink,
        "recent": wish.storage.recent,
        "layers": len(shape.layers),
        "sliding_layers": len(sliding),
        "parameters": capacity.weights.parameters,
        "weights_bytes": capacity.sizes_of_weights(),
        "weights_from": capacity.weights.origin,
        "bits_per_element": bits,
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_request": of_all,
        "state_bytes_per_request": states,
        "refusal": capacity.refusal,
        "gpu": chosen,
        "max_context": chosen["weights"]["published"]["max_context"],
        "max_requests": chosen["weights"]["published"]["max_requests"],
        "cards": [card_json(capacity, card) for card in CARDS.values()],
    }


def card_json(capacity: Capacity, card: Card) -> dict[str, Any]:
    """What fits one card, for weights as published and in 4 bits and for every cache."""
    weights: dict[str, dict[str, Any]] = {}
    for name, size in capacity.sizes_of_weights().items():
        contexts, requests, rates = {}, {}, {}
        for cache in capacity.caches:
            contexts[cache] = capacity.longest_context(cache, name, card)
            requests[cache] = capacity.most_requests(cache, name, card)
            rates[cache] = capacity.tokens_per_second(cache, name, card)
        weights[name] = {
            "fit": size <= card.usable,
            "max_context": contexts,
            "max_requests": requests,
            "tokens_per_second": rates,
        }
    return {
        "name": card.name,
        "memory_bytes": card.memory,
        "usable_bytes": card.usable,
        "bandwidth_bytes_per_second": card.bandwidth,
        "weights": weights,
    }
