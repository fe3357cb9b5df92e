"""Plans how a model is served: what its weights and caches take, and what fits which GPU."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rotationzoo.capacity.cache_bytes import Storage, longest_context, request_bytes
from rotationzoo.capacity.cards import Card
from rotationzoo.capacity.shape import Shape, read_shape
from rotationzoo.capacity.weights import Weights, weigh
from rotationzoo.model.files import text_config
from rotationzoo.model.source import Source, find
from rotationzoo.storage.files import read_json

_CONTEXT = 131072
"""Tokens of a request where neither the wish nor the model's positions say less."""
# `zoo.index.WHEEL_COPY`; its schema is not needed here, and checking it takes a second.
_INDEX = Path(__file__).parents[1] / "data" / "zoo_index.json"


@dataclass(frozen=True)
class Wish:
    """The load to serve: so many requests at once, each with so many tokens. A `context` of None is
    131,072 tokens, or the model's positions if these are fewer."""

    model: str
    context: int | None
    requests: int
    card: Card
    storage: Storage = field(default_factory=Storage)
    revision: str | None = None


@dataclass(frozen=True)
class Capacity:
    """A model measured against a wish."""

    wish: Wish
    source: Source
    shape: Shape
    weights: Weights
    positions: int | None
    """How many positions the model was made for."""
    context: int
    """Tokens of each request."""

    @property
    def caches_latents(self) -> bool:
        """Whether the model caches latents, and not keys and values of heads."""
        return any(layer.rope_dim is not None for layer in self.shape.layers)

    def sizes_of_weights(self) -> dict[str, int]:
        """Bytes of the weights, by the name of their format."""
        return {"published": self.weights.published, "4bit": self.weights.four_bit}

    def request_bytes(self, cache: str) -> int:
        """Bytes of the cache of one request of the wish."""
        return request_bytes(self.shape, cache, self.context, self.wish.storage)

    def longest_context(self, cache: str, weights: str, card: Card) -> int | None:
        """The most tokens that one request can have next to these weights on a card. None if there
        is no limit."""
        free = card.usable - self.sizes_of_weights()[weights]
        return longest_context(self.shape, cache, free, self.wish.storage)

    def most_requests(self, cache: str, weights: str, card: Card) -> int:
        """How many requests of the wished context fit next to these weights on a card."""
        free = card.usable - self.sizes_of_weights()[weights]
        return max(0, free // self.request_bytes(cache))


def measure_capacity(wish: Wish) -> Capacity:
    """Read what a model caches and weighs from its config, and from the model that it describes.

    Raises `ModelUnavailable` if there is no such model, and `UnsupportedModel` if it is not known
    what it caches.
    """
    source = find(wish.model, wish.revision)
    config = read_json(source.folder / "config.json")
    shape = read_shape(source)
    weights = weigh(source, config, shape)
    positions = text_config(config).get("max_position_embeddings")
    positions = positions if isinstance(positions, int) and positions > 0 else None
    context = wish.context or min(_CONTEXT, positions or _CONTEXT)
    return Capacity(wish, source, shape, weights, positions, context)


def zoo_entries(capacity: Capacity) -> list[dict[str, Any]]:
    """The entries for this model in the index that comes with the package."""
    entries = read_json(_INDEX).get("entries", [])
    name = capacity.source.label.lower()
    return [entry for entry in entries if entry["model"].lower() == name]
