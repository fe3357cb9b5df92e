"""Attention masks of long rows, made in blocks of queries. transformers makes a mask `[B, 1, T, T]`
for sliding windows and soft caps, of 17 GB at 131,072 tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from rotationzoo.errors import UnsupportedModel

LARGEST_MASK = 4096 * 4096  # queries times keys of the largest mask that is made whole
BLOCK_QUERIES = 512
"""Smaller blocks skip more hidden positions but call the model's attention more often."""
_IN_BLOCKS = "makes_masks_in_blocks"

MaskFunction = Callable[..., torch.Tensor | None]
"""A transformers function that makes the masks of one attention implementation."""


class NeedsWholeMask(UnsupportedModel):
    """A model that computes with a long mask itself, and needs all of it."""

    def __init__(self, what: str):
        longest = int(LARGEST_MASK**0.5)
        problem = f"this model needs its attention mask whole (its {what}), which is made only for"
        super().__init__(f"{problem} rows of up to {longest:,} tokens", f"add: --length {longest}")


@dataclass(frozen=True, eq=False)
class LongMask:
    """A mask `[B, 1, Q, T]`, stored as the function and the options that make it."""

    make: MaskFunction
    options: dict[str, Any]
    device: torch.device | str
    """The device that reads it. The options may name another one, which makes it."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(B, 1, Q, T)`."""
        options = self.options
        return options["batch_size"], 1, options["q_length"], options["kv_length"]

    def rows(self, queries: slice) -> torch.Tensor:
        """The mask `[B, 1, q, T]` of consecutive queries."""
        # With the skip, the result might be None for a causal mask.
        rows = self.make(**{**self._options_of(queries), "allow_is_causal_skip": False})
        assert rows is not None
        return rows.to(self.device)

    def _options_of(self, queries: slice) -> dict[str, Any]:
        first, last, _ = queries.indices(self.shape[2])
        offset = self.options.get("q_offset", 0) + first
        return {**self.options, "q_length": last - first, "q_offset": offset}

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> "LongMask":
        """The mask of consecutive queries and all keys. Gemma 4 uses it."""
        _, _, queries, keys = index
        if keys.indices(self.shape[3]) != (0, self.shape[3], 1):
            raise NeedsWholeMask("keys")
        return replace(self, options=self._options_of(queries))

    def to(self, device: torch.device | str, *_: Any, **__: Any) -> "LongMask":
        """The same mask for another device. accelerate moves the inputs of layers."""
        return replace(self, device=device)

    def check(self, queries: int, keys: int, module: torch.nn.Module) -> None:
        """Raise `NeedsWholeMask` if a module's attention needs another shape."""
        if self.shape[2:] != (queries, keys):
            raise NeedsWholeMask(f"shape in {type(module).__name__}")


def query_blocks(queries: int) -> Iterator[slice]:
    """`queries` positions as slices of at most `BLOCK_QUERIES`."""
    for start in range(0, queries, BLOCK_QUERIES):
        yield slice(start, min(start + BLOCK_QUERIES, queries))


def seen_keys(mask: torch.Tensor) -> torch.Tensor:
    """The keys, in ascending order, that at least one query of a mask `[B, 1, Q, T]` sees."""
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    return visible.flatten(0, 2).any(0).nonzero()[:, 0]


@contextmanager
def long_masks(implementation: str) -> Iterator[None]:
    """Inside the block, models with this attention implementation get a `LongMask` for masks above
    `LARGEST_MASK`. Raises `NeedsWholeMask` where a model needs one whole."""
    from transformers import masking_utils

    functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    original: MaskFunction | None = functions.get(implementation)
    if original is None or hasattr(original, _IN_BLOCKS):
        yield
        return

    def make(**options: Any) -> torch.Tensor | LongMask | None:
        queries, keys = (cast(Any, options.get(name)) for name in ("q_length", "kv_length"))
        # They are tensors while a graph is captured.
        known = isinstance(queries, int) and isinstance(keys, int)
        if not known or queries * keys <= LARGEST_MASK:
            return original(**options)
        # sdpa makes no mask for plain causal attention.
        local, padding = options.get("local_size"), options.get("attention_mask")
        causal = queries == keys and padding is None and (local is None or keys < local)
        if causal and implementation == "sdpa" and options.get("allow_is_causal_skip", True):
            return original(**options)
        return LongMask(original, options, options.get("device", "cpu"))

    setattr(make, _IN_BLOCKS, True)
    try:
        with registered(functions, implementation, make):
            yield
    except AttributeError as error:
        if isinstance(error.obj, LongMask):
            raise NeedsWholeMask(str(error.name)) from error
        raise


@contextmanager
def registered(registry: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, a transformers registry has this function under a name."""
    original = registry.get(name)
    registry[name] = function
    try:
        yield
    finally:
        registry.pop(name)  # uncovers the library's own entry ...
        if registry.get(name) is not original:
            registry[name] = original  # ... or puts back an earlier override
