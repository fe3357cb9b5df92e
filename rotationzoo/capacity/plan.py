"""Plans how a model is served: the sizes of its weights and caches, and what fits which GPU."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from rotationzoo.capacity.shape import CACHES, Shape, Storage, read_shape, weigh
from rotationzoo.codec.size import CONTEXT
from rotationzoo.errors import UsageError
from rotationzoo.model import loading
from rotationzoo.model.source import Source, find
from rotationzoo.recipe.rope import position_count
from rotationzoo.storage.files import read_json
from rotationzoo.words import counted, nearest, size_words

UTILIZATION = 0.92  # of a GPU's memory: vLLM's default (`gpu_memory_utilization`)
OWN = 1_380_000_000
"""Bytes that vLLM 0.32.0 keeps on a GPU for activations, graphs and itself, measured with
Qwen3-8B's shape on an H100, with 8,192 tokens and 64 requests a step (docs/plan.md)."""
_GIB = 1 << 30
_UNITS = {"gib": _GIB, "gb": 10**9, "g": _GIB, "tib": 1024 * _GIB, "tb": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|g|tib|tb)", re.IGNORECASE)
_SEVERAL = re.compile(r"(\d{1,4})\s*[x*]\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    """One GPU, or `count` of one kind that share a model evenly."""

    kind: str
    memory: int  # bytes of one
    count: int = 1

    @property
    def name(self) -> str:
        return self.kind if self.count == 1 else f"{self.count} x {self.kind}"

    @property
    def usable(self) -> int:
        """Bytes of all GPUs for weights and cache in a server."""
        return max(0, int(self.count * self.memory * UTILIZATION) - self.count * OWN)


OTHERS = "T4", "MI300X"  # too old, or from AMD: our kernels do not run on them
# GiB as PyTorch's errors report them ("has a total capacity of"), up to 8 % less than a data sheet.
_SIZES = {
    "RTX 3090": 23.56, "RTX 4090": 23.52, "RTX 5060 Ti": 15.47, "RTX 5070": 11.49,
    "RTX 5070 Ti": 15.46, "RTX 5080": 15.47, "RTX 5090": 31.36, "RTX A6000": 47.4,
    "RTX PRO 6000": 94.97, "T4": 14.56, "L4": 22.03, "A10G": 21.99, "L40S": 44.39,
    "A100 80GB": 79.15, "H100": 79.18, "H200": 139.8, "B200": 178.35, "MI300X": 191.69,
}  # fmt: skip
CARDS = {name: Card(name, int(size * _GIB)) for name, size in _SIZES.items()}


def parse_card(text: str) -> Card:
    """A GPU by name (`H100`), by memory (`24GiB`), or several (`2x24GiB`). Raises `UsageError`."""
    match = _SEVERAL.fullmatch(text.strip())
    if match and int(match[1]) > 0:
        each = parse_card(match[2])
        return replace(each, count=each.count * int(match[1]))
    known, plain = {_plain(name): card for name, card in CARDS.items()}, _plain(text)
    if card := known.get(plain) or known.get(f"rtx{plain}"):
        return card
    size = _SIZE.fullmatch(text.strip())
    if size and (memory := int(float(size[1]) * _UNITS[size[2].lower()])) > 0:
        return Card(text.strip(), memory)
    problem = f"--gpu {text!r} is neither a card nor an amount of memory{nearest(text, CARDS)}"
    raise UsageError(problem, f"give one such as 24GiB, 2x24GiB, or a card: {', '.join(CARDS)}")


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|tesla|blackwell|80gb|sxm", "", text.lower())


WEIGHTS_WORDS = {"published": "weights as published", "4bit": "weights in 4 bits"}
_MORE_CARDS = 2, 4, 8  # offered if one is too small
_SMALLEST = CACHES[-1]


@dataclass(frozen=True)
class Wish:
    """The load: `requests` at once of `context` tokens (None: `CONTEXT` or the positions)."""

    model: str
    context: int | None
    requests: int
    card: Card
    storage: Storage = field(default_factory=Storage)
    revision: str | None = None
    rope_scaling: str | None = None


@dataclass(frozen=True)
class Capacity:
    """A model measured against a wish."""

    wish: Wish
    source: Source
    shape: Shape
    weights: dict[str, int]
    weights_from: str
    positions: int | None
    context: int  # tokens of each request
    request_bytes: dict[str, int]  # of one such request in every cache

    def free_bytes(self, weights: str, cache: str, card: Card) -> int:
        """Bytes of a card for requests, next to these weights and what a server takes once."""
        room = card.usable - self.weights[weights]
        if cache != _SMALLEST:
            return room
        return 0 if card.kind in OTHERS else room - self.shape.server_bytes(self.wish.storage, 0)

    def longest(self, weights: str, cache: str, card: Card, requests: int = 1) -> int | None:
        """The most tokens of each request next to these weights on a card; None if unlimited."""
        room = self.free_bytes(weights, cache, card) // requests
        return self.shape.longest_context(cache, room, self.wish.storage)

    def most_requests(self, weights: str, cache: str, card: Card) -> int:
        """How many requests of the wished context fit next to these weights on a card."""
        return max(0, self.free_bytes(weights, cache, card) // self.request_bytes[cache])

    def cache_words(self, cache: str) -> str:
        dim = self.shape.layers[0].key_dim
        return f"{self.wish.storage.row_bits(dim) / dim:.3g} bits" if cache == _SMALLEST else cache


def measure_capacity(wish: Wish) -> Capacity:
    """Read what a model caches and weighs. Raises `ModelUnavailable` or `UnsupportedModel`."""
    source = find(wish.model, wish.revision)
    config = read_json(source.folder / "config.json")
    shape = read_shape(source)
    weights, origin = weigh(source, config, shape)
    positions = position_count(loading.load_config(source, wish.rope_scaling))
    context = wish.context or min(CONTEXT, positions or CONTEXT)
    sizes = {cache: shape.request_bytes(cache, context, wish.storage) for cache in CACHES}
    return Capacity(wish, source, shape, weights, origin, positions, context, sizes)


@dataclass(frozen=True)
class Answer:
    """Whether a wish fits a card, in words, and the smallest change of weights and cache."""

    words: str
    weights: str | None = None
    cache: str | None = None
    context: int | None = None  # if nothing fits: the tokens per request that would, at most


def judge_wish(capacity: Capacity) -> Answer:
    """The answer to a wish."""
    card, requests = capacity.wish.card, capacity.wish.requests
    few = capacity.cache_words(_SMALLEST)
    wish = f"{counted(requests, 'request')} of {counted(capacity.context, 'token')}"
    if fitting := _smallest_change(capacity, card):
        weights, cache = fitting
        words = f"Yes: {card.name} holds {wish} with {_fitting_words(capacity, *fitting)}"
        words += f"; at most {capacity.most_requests(weights, cache, card):,} fit"
        if cache != _SMALLEST:
            words += f", and {capacity.most_requests(weights, _SMALLEST, card):,} in {few}"
        return Answer(words, weights, cache)
    once = capacity.shape.server_bytes(capacity.wish.storage, 0)
    need = once + requests * capacity.request_bytes[_SMALLEST]
    four_bit, usable = size_words(capacity.weights["4bit"]), size_words(card.usable)
    words = f"{wish} would take {size_words(need)} of cache even in {few}, on top of "
    words += f"{four_bit} of weights in 4 bits, and {card.name} has {usable} for both"
    tokens = capacity.longest("4bit", _SMALLEST, card, requests) or None
    if tokens:
        words += f"; --context {tokens} fits with {_fitting_words(capacity, '4bit', _SMALLEST)}"
    for count in _MORE_CARDS:
        cards = replace(card, count=count * card.count)
        if fitting := _smallest_change(capacity, cards):
            words += f"; {cards.name} hold it with {_fitting_words(capacity, *fitting)}"
            break
    return Answer(f"No: {words}", context=tokens)


def _smallest_change(capacity: Capacity, card: Card) -> tuple[str, str] | None:
    """The weights and cache that make a wish fit: published weights and larger caches first."""
    requests, changes = capacity.wish.requests, product(WEIGHTS_WORDS, CACHES)
    return next((each for each in changes if capacity.most_requests(*each, card) >= requests), None)


def _fitting_words(capacity: Capacity, weights: str, cache: str) -> str:
    return f"{WEIGHTS_WORDS[weights]} and a cache in {capacity.cache_words(cache)}"


def remarks(capacity: Capacity) -> Iterator[str]:
    """What prevents the wish on any card or this one, and what the numbers leave out."""
    wish, card, shape = capacity.wish, capacity.wish.card, capacity.shape
    if capacity.positions and capacity.context > capacity.positions:
        made, tokens = counted(capacity.positions, "position"), counted(capacity.context, "token")
        scaling = f"--rope-scaling yarn:{-(-capacity.context // capacity.positions)}"
        yield f"{wish.model} was made for {made}: {tokens} need RoPE scaling: {scaling}"
    elif capacity.positions:
        yield f"{capacity.positions:,} positions: longer requests need RoPE scaling"
    if card.kind in OTHERS:
        yield f"our kernels do not run on {card.kind}, which gets no cache of ours"
    paged = [layer for layer in shape.layers if wish.storage.has_pages(layer)]
    if paged and len({(layer.kv_heads, layer.key_dim) for layer in shape.layers}) > 1:
        yield "serve takes no model whose layers have heads of several shapes"
    if any(layer.kv_heads % card.count for layer in paged):
        yield f"serve does not split the KV heads over {card.count} GPUs"
    if shape.uncounted_states:
        yield "states of layers without keys, or keys of a sparse index, are not counted"
    if capacity.weights_from == "config":
        yield "the size of the weights was computed from the config"


def capacity_json(capacity: Capacity) -> dict[str, Any]:
    """The report: sizes in bytes."""
    wish, shape, sizes = capacity.wish, capacity.shape, capacity.request_bytes
    per_token = {cache: size / capacity.context for cache, size in sizes.items()}
    kept, windows = sizes["int2"] - shape.state_bytes, [each.window for each in shape.layers]
    states = None if shape.uncounted_states else shape.state_bytes
    chosen = card_json(capacity, wish.card)
    published = chosen["weights"]["published"]
    return {
        "model": wish.model,
        "revision": capacity.source.revision,
        "context": capacity.context,
        "requests": wish.requests,
        "positions": capacity.positions,
        "sink": wish.storage.sink,
        "recent": wish.storage.recent,
        "layers": len(shape.layers),
        "sliding_layers": len(windows) - windows.count(None),
        "parameters": shape.parameters,
        "weights_bytes": capacity.weights,
        "weights_from": capacity.weights_from,
        "bits_per_element": 8 * kept / shape.elements(capacity.context),
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_request": sizes,
        "state_bytes_per_request": states,
        "server_bytes": shape.server_bytes(wish.storage, wish.requests),
        "gpu": chosen,
        "max_context": published["max_context"],
        "max_requests": published["max_requests"],
        "cards": [card_json(capacity, card) for card in CARDS.values()],
    }


def card_json(capacity: Capacity, card: Card) -> dict[str, Any]:
    """The largest contexts and batches on a card, for both kinds of weights and every cache."""
    weights: dict[str, dict[str, Any]] = {}
    for name, size in capacity.weights.items():
        contexts = {cache: capacity.longest(name, cache, card) for cache in CACHES}
        requests = {cache: capacity.most_requests(name, cache, card) for cache in CACHES}
        weights[name] = dict(fit=size <= card.usable, max_context=contexts, max_requests=requests)
    return {
        "name": card.name,
        "memory_bytes": card.count * card.memory,
        "usable_bytes": card.usable,
        "weights": weights,
    }
