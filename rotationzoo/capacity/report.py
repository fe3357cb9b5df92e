"""The report of a plan: every number in one table, as JSON has it, and the verdict on a wish in
plain sentences.
"""

from typing import Any

from rotationzoo.capacity.cache_bytes import CACHES, elements
from rotationzoo.capacity.cards import CARDS, Card
from rotationzoo.capacity.job import Capacity
from rotationzoo.words import counted

WEIGHTS_WORDS = {"published": "weights as published", "4bit": "weights in 4 bits"}


def size_words(count: int) -> str:
    """A number of bytes in GB (10^9) or MB."""
    if count < 1e9:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e9:.1f} GB" if count < 1e11 else f"{count / 1e9:,.0f} GB"


def wish_words(capacity: Capacity) -> str:
    """The wish, such as `256 requests of 100,000 tokens`."""
    wish = capacity.wish
    return f"{counted(wish.requests, 'request')} of {counted(wish.context, 'token')}"


def judge_wish(capacity: Capacity, card: Card) -> tuple[bool, str]:
    """Whether the wish fits a card in any way, and the sentence that says how, or why not.

    Weights as published come before weights in 4 bits, and larger caches before smaller ones.
    """
    wish = wish_words(capacity)
    for weights, words in WEIGHTS_WORDS.items():
        fitting = []
        for cache in capacity.caches:
            if capacity.most_requests(cache, weights, card) >= capacity.wish.requests:
                fitting.append(cache)
        if fitting:
            *others, last = fitting
            kinds = f"{', '.join(others)} or {last}" if others else last
            return True, f"Yes: {card.name} holds {wish} with {words} and a cache in {kinds}"
    cache = min(capacity.caches, key=capacity.request_bytes)
    need = size_words(capacity.wish.requests * capacity.request_bytes(cache))
    four_bit = size_words(capacity.weights.four_bit)
    usable = size_words(card.usable)
    if capacity.weights.four_bit > card.usable:
        return False, (
            f"No: even in 4 bits, the weights take {four_bit}, and {card.name} has {usable} for "
            "weights and cache"
        )
    verb = "needs" if capacity.wish.requests == 1 else "need"
    return False, (
        f"No: {wish} {verb} {need} of cache even in {cache}, on top of {four_bit} of weights in 4 "
        f"bits, and {card.name} has {usable} for both"
    )


def remarks(capacity: Capacity) -> list[str]:
    """Remarks: what the numbers leave out, and what prevents the wish on any card."""
    wish, lines = capacity.wish, []
    if capacity.refusal:
        lines.append(f"{wish.model} cannot have an int2 cache: {capacity.refusal}")
    if capacity.positions is not None and wish.context > capacity.positions:
        lines.append(
            f"{wish.model} was made for {counted(capacity.positions, 'position')}: a request of "
            f"{counted(wish.context, 'token')} needs RoPE scaling"
        )
    if capacity.shape.uncounted_states:
        lines.append("the states of layers without keys and values are not counted")
    if capacity.weights.origin == "config":
        lines.append("the size of the weights was computed from the config")
    return lines


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
    """The largest contexts and batches on one card, for weights as published and in 4 bits, and
    every cache."""
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
