"""The report of a plan: every number in one table, as JSON has it, and the verdict on a wish in
plain sentences.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

from rotationzoo.capacity.cache_bytes import CACHES, elements, longest_context
from rotationzoo.capacity.cards import CARDS, Card, several
from rotationzoo.capacity.job import Capacity
from rotationzoo.words import counted, size_words

WEIGHTS_WORDS = {"published": "weights as published", "4bit": "weights in 4 bits"}
_MOST_CARDS = 16
"""No more are offered where one card is too small."""


def wish_words(capacity: Capacity) -> str:
    """The wish, such as `256 requests of 100,000 tokens`."""
    requests, tokens = capacity.wish.requests, capacity.context
    return f"{counted(requests, 'request')} of {counted(tokens, 'token')}"


@dataclass(frozen=True)
class Answer:
    """Whether a wish fits a card, in a sentence that says how, or what would fit instead.

    `weights` and `cache`: the smallest change that makes it fit; None where nothing does.
    """

    words: str
    weights: str | None = None
    cache: str | None = None
    context: int | None = None
    """Where nothing does: how many tokens of each request would fit, in the smallest cache."""


def judge_wish(capacity: Capacity, card: Card) -> Answer:
    """The answer to a wish."""
    fitting, wish = _smallest_change(capacity, card), wish_words(capacity)
    if fitting is None:
        words = f"No: {_shortage(capacity, card)}{_what_fits(capacity, card)}"
        return Answer(words, context=_fitting_context(capacity, card))
    weights, cache = fitting
    words = f"Yes: {card.name} holds {wish} with {WEIGHTS_WORDS[weights]} and a cache in {cache}"
    words += f"; at most {capacity.most_requests(cache, weights, card):,} fit"
    if (smallest := CACHES[-1]) != cache:
        words += f", and {capacity.most_requests(smallest, weights, card):,} in {smallest}"
    return Answer(words, weights, cache)


def _smallest_change(capacity: Capacity, card: Card) -> tuple[str, str] | None:
    """The weights and the cache with which a wish fits a card: weights as published come before
    weights in 4 bits, and larger caches before smaller ones."""
    for weights, cache in product(WEIGHTS_WORDS, CACHES):
        if capacity.most_requests(cache, weights, card) >= capacity.wish.requests:
            return weights, cache
    return None


def _shortage(capacity: Capacity, card: Card) -> str:
    """Why a wish does not fit, even with the smallest weights and cache."""
    cache, wish = CACHES[-1], capacity.wish
    need = size_words(wish.requests * capacity.request_bytes(cache))
    four_bit, usable = size_words(capacity.weights.four_bit), size_words(card.usable)
    if capacity.weights.four_bit > card.usable:
        return (
            f"even in 4 bits, the weights take {four_bit}, and {card.name} has {usable} for "
            "weights and cache"
        )
    verb = "needs" if wish.requests == 1 else "need"
    return (
        f"{wish_words(capacity)} {verb} {need} of cache even in {cache}, on top of {four_bit} of "
        f"weights in 4 bits, and {card.name} has {usable} for both"
    )


def _what_fits(capacity: Capacity, card: Card) -> str:
    """The nearest wishes that fit: fewer tokens, or more cards of the kind."""
    cache, words = CACHES[-1], ""
    if tokens := _fitting_context(capacity, card):
        words += f"; --context {tokens} fits with weights in 4 bits and a cache in {cache}"
    for count in range(2, _MOST_CARDS + 1):
        cards = several(card, count)
        if fitting := _smallest_change(capacity, cards):
            weights, cache = fitting
            fit = f"{WEIGHTS_WORDS[weights]} and a cache in {cache}"
            return f"{words}; {cards.name} hold it with {fit}"
    return words


def _fitting_context(capacity: Capacity, card: Card) -> int | None:
    """The most tokens of each request, in the smallest weights and cache; None if none fit."""
    free = (card.usable - capacity.weights.four_bit) // capacity.wish.requests
    cache = CACHES[-1]
    return longest_context(capacity.shape, cache, free, capacity.wish.storage) or None


def remarks(capacity: Capacity) -> list[str]:
    """Remarks: what the numbers leave out, and what prevents the wish on any card."""
    wish, tokens, lines = capacity.wish, counted(capacity.context, "token"), []
    if capacity.positions is not None and capacity.context > capacity.positions:
        lines.append(
            f"{wish.model} was made for {counted(capacity.positions, 'position')}: a request of "
            f"{tokens} needs RoPE scaling"
        )
    elif wish.context is None and capacity.context == capacity.positions:
        lines.append(f"without --context, a request has {tokens}, all positions of {wish.model}")
    if capacity.shape.uncounted_states:
        lines.append("states of layers without keys, or keys of a sparse index, are not counted")
    if capacity.weights.origin == "config":
        lines.append("the size of the weights was computed from the config")
    return lines


def capacity_json(capacity: Capacity) -> dict[str, Any]:
    """The report: sizes in bytes."""
    wish, shape = capacity.wish, capacity.shape
    sizes = {cache: capacity.request_bytes(cache) for cache in CACHES}
    per_token = {cache: size / capacity.context for cache, size in sizes.items()}
    kept = sizes["int2"] - shape.state_bytes
    bits = kept * 8 / elements(shape, capacity.context)
    chosen = card_json(capacity, wish.card)
    states = None if shape.uncounted_states else shape.state_bytes
    sliding = [layer for layer in shape.layers if layer.window is not None]
    return {
        "model": wish.model,
        "revision": capacity.source.revision,
        "context": capacity.context,
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
        "kv_bytes_per_request": sizes,
        "state_bytes_per_request": states,
        "refusal": None,  # whatever can be planned has every cache
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
        contexts, requests = {}, {}
        for cache in CACHES:
            contexts[cache] = capacity.longest_context(cache, name, card)
            requests[cache] = capacity.most_requests(cache, name, card)
        weights[name] = {
            "fit": size <= card.usable,
            "max_context": contexts,
            "max_requests": requests,
        }
    return {
        "name": card.name,
        "memory_bytes": card.memory,
        "usable_bytes": card.usable,
        "weights": weights,
    }
