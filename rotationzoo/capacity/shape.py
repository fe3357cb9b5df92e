"""A model's shape for capacity planning: the bytes of its weights and of a request's cache."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rotationzoo.codec.formats import SEGMENTS, VLLM
from rotationzoo.codec.int2 import bits_per_element
from rotationzoo.codec.size import EXACT_BITS
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import UnsupportedModel
from rotationzoo.geometry import Layer, cached_layers, shares_blocks
from rotationzoo.model import loading
from rotationzoo.model.capture import decoder, returned_cache
from rotationzoo.model.files import indexed_bytes, text_config, weight_files
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.source import Source
from rotationzoo.sides import HEADS
from rotationzoo.vllm.prompts import scratch_sizes
from rotationzoo.vllm.segments import LONG
from rotationzoo.vllm.steps import count_slots

_PLAIN_BITS = {"bf16": 16, "fp8": 8}
CACHES = (*_PLAIN_BITS, "int2")
_PAGED = SEGMENTS, VLLM  # the formats of our backend for vLLM
_LONGEST = 1 << 31  # tokens; what holds these holds any context
_PAGE = 64  # tokens, for which our backend asks vLLM
_STEP = 8192  # tokens of a server's step on a large GPU, and so of a chunk of a prompt
_MATRICES = 4  # in float32: rotation, transform, and the products for each way


@dataclass(frozen=True)
class CachedLayer(Layer):
    """A layer with its own cache."""

    window: int | None = None  # tokens that a layer with sliding attention keeps; None: all

    def tokens_held(self, context: int) -> int:
        """The tokens of a request of `context` tokens that the layer keeps."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Shape:
    """A model's cache and weights."""

    layers: tuple[CachedLayer, ...]
    embeddings: int  # parameters of the input embedding and of an output projection of its own
    parameters: int = 0
    expert_parameters: int = 0  # of routed experts, in all layers together
    state_bytes: int = 0  # per request, of linear attention, Mamba and convolutions
    uncounted_states: bool = False  # of unknown size, or keys of a sparse attention's index

    def elements(self, context: int) -> int:
        """Cached elements of a request of `context` tokens, without states."""
        return sum(each.elements * each.tokens_held(context) for each in self.layers)

    def request_bytes(self, cache: str, context: int, storage: "Storage") -> int:
        """Bytes of the cache of one request of `context` tokens, with states. `int2` is stored as
        `storage` says: our backend for vLLM stores every token in pages, with copies of pages that
        windows touch, and layers with a sliding window in bf16."""
        if cache in _PLAIN_BITS:
            bits: float = _PLAIN_BITS[cache] * self.elements(context)
        else:
            bits = sum(_stored_bits(layer, context, storage) for layer in self.layers)
        return math.ceil(bits / 8) + self.state_bytes

    def server_bytes(self, storage: "Storage", requests: int) -> int:
        """Bytes that our vLLM backend takes besides pages: exact copies, matrices, scratch."""
        layers, total = [each for each in self.layers if storage.has_pages(each)], 0
        for layer in layers:
            matrices = _MATRICES * layer.kv_heads * 4 + layer.query_heads * 2
            total += matrices * (layer.key_dim**2 + layer.value_dim**2)
            total += storage.copied_tokens(requests) * layer.elements * EXACT_BITS // 8
        for layer in layers[:1]:  # all share this memory
            room = max(LONG, _STEP + storage.sink + storage.recent)
            queries = _STEP, layer.query_heads, layer.key_dim
            rows = room, layer.kv_heads, layer.key_dim
            sizes = scratch_sizes(queries, rows, torch.bfloat16)
            total += sum(math.prod(size) * dtype.itemsize for size, dtype in sizes)
        return total

    def longest_context(self, cache: str, free: int, storage: "Storage") -> int | None:
        """The most tokens of a request in `free` bytes; None if every layer slides."""
        sizes = partial(self.request_bytes, cache, storage=storage)
        too_many = bisect_right(range(_LONGEST + 1), free, key=sizes)
        return None if too_many > _LONGEST else max(0, too_many - 1)


def read_shape(source: Source) -> Shape:
    """Build a model on `meta` and inspect its attention and cache. Raises `ModelUnavailable` for a
    config that cannot be read, and `UnsupportedModel` for another kind of cache."""
    config = loading.load_config(source)
    model = loading.on_meta(config, source.name)
    geometry = geometry_on_meta(model)
    if geometry is None:
        problem = f"the cache of {source.name} cannot be read from its config without weights"
        raise UnsupportedModel(problem, "fetch them and run: rotationzoo generate")
    kept, text = DynamicCache(config=config).layers, config.get_text_config(decoder=True)
    windows = {index: getattr(each, "sliding_window", None) for index, each in enumerate(kept)}
    owners = cached_layers(geometry)
    layers = [CachedLayer(**vars(each), window=windows.get(each.index)) for each in owners]
    has_index = any(hasattr(each, "update_indexer") for each in kept)
    states = _count_states(model) if shares_blocks(config) else 0
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings = {id(each.weight): each.weight.numel() for each in ends if each is not None}
    routed = [p.numel() for name, p in model.named_parameters() if ".experts." in name]
    return Shape(
        tuple(layers),
        embeddings=sum(embeddings.values()),
        parameters=model.num_parameters(),
        expert_parameters=sum(routed),
        state_bytes=states,
        uncounted_states=has_index or (len(geometry) < text.num_hidden_layers and not states),
    )


@torch.no_grad()
def _count_states(model: PreTrainedModel) -> int:
    """Bytes of a request's states, as servers store them: a convolution's inputs except the newest
    in bfloat16, everything else in float32."""
    ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
    output, total = decoder(model)(input_ids=ids, use_cache=True), 0
    for layer in returned_cache(output).layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            inputs = (each for each in layer.conv_states.values() if each is not None)
            matrices = (each for each in layer.recurrent_states.values() if each is not None)
            total += sum(2 * (each.numel() - each[..., 0].numel()) for each in inputs)
            total += sum(4 * each.numel() for each in matrices)
    return total


@dataclass(frozen=True)
class Storage(CacheLayout):
    """How our cache is stored: a layout, and bits per element (None: those of the format)."""

    bits: float | None = None

    def has_pages(self, layer: CachedLayer) -> bool:
        """Whether our backend for vLLM stores a layer in pages of codes."""
        return self.format in _PAGED and layer.window is None and layer.cached is HEADS

    def row_bits(self, dim: int) -> float:
        """Bits of a row, with its scale and offset."""
        return dim * (self.bits or bits_per_element(dim, None, self.format))

    def copied_tokens(self, requests: int) -> int:
        """Tokens with exact copies, next to their codes, in a server of `requests` requests."""
        return _PAGE * count_slots(self, _PAGE, requests)


def _stored_bits(layer: CachedLayer, context: int, storage: Storage) -> float:
    held, whole = layer.tokens_held(context), layer.elements * EXACT_BITS
    stored = layer.kv_heads * sum(storage.row_bits(layer.dims[side]) for side in layer.sides)
    stored += layer.exact_elements * EXACT_BITS
    if storage.has_pages(layer):
        copied = storage.copied_tokens(1) - storage.copied_tokens(0)
        return -(-context // _PAGE) * _PAGE * stored + copied * whole
    # A layer that slides forgets the sink, and has no codes in vLLM.
    exact = min(held, max(0, storage.sink - context + held) + storage.recent)
    if storage.format in _PAGED and layer.window is not None:
        exact = held
    return exact * whole + (held - exact) * stored


FOUR_BITS = 4 + (16 + 4) / 128  # AWQ and GPTQ: a float16 scale and a 4-bit zero for each 128
_MXFP4_BITS = 4 + 8 / 32  # an 8-bit exponent for each block of 32
_TYPE_BITS = {"float64": 64.0, "float32": 32.0, "bfloat16": 16.0, "float16": 16.0}


def weigh(source: Source, config: dict[str, Any], shape: Shape) -> tuple[dict[str, int], str]:
    """The bytes of a model's weights, `published` and in `4bit`, and their origin: `files`, `index`
    or `config`. Embedding and output projection stay in 16 bits, as in AWQ and GPTQ."""
    bits, kept = _published_bits(config), shape.embeddings
    if bits == _MXFP4_BITS:
        kept = shape.parameters - shape.expert_parameters
    here, named = weight_files(source.folder), indexed_bytes(source.folder) or 0
    sizes = {"files": sum(path.stat().st_size for path in here), "index": named}
    sizes["config"] = _packed(shape, bits, kept)
    origin, published = next((name, size) for name, size in sizes.items() if size)
    four_bit = _packed(shape, FOUR_BITS, shape.embeddings)
    if bits < 5 or published < four_bit:
        four_bit = published  # already 4 bits
    return {"published": published, "4bit": four_bit}, origin


def _packed(shape: Shape, bits: float, kept: int) -> int:
    """Bytes if all parameters except `kept` take `bits`; those take 16 bits, if `bits` is less."""
    kept = 0 if bits >= 16 else min(kept, shape.parameters)
    return int(kept * 2 + (shape.parameters - kept) * bits / 8)


def _published_bits(config: dict[str, Any]) -> float:
    """Bits of a published weight; with MXFP4, only of routed experts."""
    tables = config, text_config(config)
    for table in tables:
        quantized = table.get("quantization_config")
        if isinstance(quantized, dict):
            if quantized.get("quant_method") == "mxfp4":
                return _MXFP4_BITS
            bits = quantized.get("bits", 4 if quantized.get("load_in_4bit") else 8)
            return FOUR_BITS if bits == 4 else 8.0
    names = [str(table.get(key)) for table in tables for key in ("dtype", "torch_dtype")]
    return next((_TYPE_BITS[name] for name in names if name in _TYPE_BITS), 16.0)
