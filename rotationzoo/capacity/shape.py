"""The shape of a model as capacity planning sees it: what each layer caches, and what its weights
are made of.

It is read from `config.json` alone where that is possible, because importing torch takes seconds.
That is so for model types whose config is known to mean what it says. All others, and configs that
leave a default to the library, are built on `meta` (`meta_shape`).
"""

from dataclasses import dataclass
from typing import Any

from rotationzoo.model.files import MOST_LAYERS


@dataclass(frozen=True)
class CachedLayer:
    """One layer that stores keys and values of its own. Layers that read another layer's cache, and
    layers without attention, have none."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """How many tokens a layer with sliding attention keeps; None keeps all."""

    @property
    def elements(self) -> int:
        """Cached elements per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    def tokens_held(self, context: int) -> int:
        """How many tokens of a request of `context` tokens the layer keeps."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Shape:
    """A model's cache and weights, as far as its config tells."""

    layers: tuple[CachedLayer, ...]
    embedding: int
    """Parameters of the input embedding."""
    tied: bool
    """Whether the output projection is the input embedding."""
    parameters: int | None = None
    """All parameters; None where a config alone does not tell. From a config that is read without
    building the model, it counts the matrices and leaves out norms and biases."""
    expert_parameters: int = 0
    """Parameters of routed experts, in all layers together."""
    experts: int = 1
    experts_per_token: int = 1
    latent_elements: int = 0
    """Cached elements per token of a model that stores a latent (MLA), which has no `layers`."""
    state_bytes: int = 0
    """Bytes per request of linear attention's states, which do not grow with the context."""
    uncounted_states: bool = False
    """Whether layers without keys and values keep states of a size that is not known here."""

    def touched_experts(self, requests: int) -> float:
        """The expected share of routed experts that one decoding step of `requests` tokens reads,
        if each token chooses uniformly: `1 - (1 - k / E)^N`."""
        chosen = min(1.0, self.experts_per_token / self.experts)
        return 1.0 - (1.0 - chosen) ** requests


# Types whose head dimension is hidden size / heads where the config names none.
_DIVIDED = {"llama", "mistral", "mixtral", "phi3", "qwen2"}
_KNOWN = _DIVIDED | {
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_oss", "qwen3", "qwen3_moe",
}  # fmt: skip
_LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"}
_ALTERNATING = {"gemma2", "gpt_oss"}  # layers 0, 2, ... slide
_EVERY_LAYER = {"mistral", "mixtral", "phi3"}  # all slide where there is a window
_LARGEST = 1 << 31


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def shape_of_config(config: dict[str, Any]) -> Shape | None:
    """The shape that a config describes; None where it takes the model itself to tell."""
    text = text_config(config)
    kind = str(text.get("model_type"))
    if kind in _LATENT:
        return _latent_shape(text)
    heads, kv_heads = _number(text, "num_attention_heads"), _number(text, "num_key_value_heads")
    hidden, count = _number(text, "hidden_size"), _number(text, "num_hidden_layers")
    vocabulary = _number(text, "vocab_size")
    if kind not in _KNOWN or not (heads and kv_heads and hidden and count and vocabulary):
        return None
    dim = _number(text, "head_dim")
    if dim is None and kind in _DIVIDED:
        dim = hidden // heads
    windows = _windows(text, kind, count)
    if dim is None or windows is None:
        return None
    layers = tuple(CachedLayer(kv_heads, dim, dim, window) for window in windows)
    tied = text.get("tie_word_embeddings", kind in ("gemma2", "gemma3_text")) is True
    attention = count * hidden * dim * 2 * (heads + kv_heads)
    embedding = vocabulary * hidden
    routed, dense = _feed_forward(text, kind, count, hidden)
    parameters = None
    # A model of several parts has other weights besides its language model's.
    if dense is not None and text is config:
        parameters = embedding * (1 if tied else 2) + attention + dense + routed
    return Shape(
        layers,
        embedding,
        tied,
        parameters,
        routed,
        _experts(text) or 1,
        _number(text, "num_experts_per_tok") or 1,
    )


def _latent_shape(text: dict[str, Any]) -> Shape | None:
    """A model that caches a latent of all heads and one rotated key (MLA)."""
    count, hidden = _number(text, "num_hidden_layers"), _number(text, "hidden_size")
    rank, rotated = _number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")
    vocabulary = _number(text, "vocab_size")
    if not (count and hidden and rank and rotated and vocabulary):
        return None
    routed, dense = _feed_forward(text, "", count, hidden)
    attention = _latent_attention(text, hidden, rank, rotated)
    tied = text.get("tie_word_embeddings") is True
    parameters = None
    if dense is not None and attention is not None:
        parameters = vocabulary * hidden * (1 if tied else 2) + count * attention + dense + routed
    return Shape(
        (),
        vocabulary * hidden,
        tied,
        parameters,
        routed,
        _experts(text) or 1,
        _number(text, "num_experts_per_tok") or 1,
        count * (rank + rotated),
    )


def _latent_attention(text: dict[str, Any], hidden: int, rank: int, rotated: int) -> int | None:
    """Parameters of one layer of MLA: to queries, directly or by way of a latent; to the latent of
    keys and values, and from it; and the output projection."""
    heads, value = _number(text, "num_attention_heads"), _number(text, "v_head_dim")
    plain = _number(text, "qk_nope_head_dim")
    if not (heads and value and plain):
        return None
    query = heads * (plain + rotated)
    query_rank = _number(text, "q_lora_rank")
    to_query = hidden * query
    if query_rank:
        to_query = query_rank * (hidden + query)
    to_keys = hidden * (rank + rotated) + rank * heads * (plain + value)
    return to_query + to_keys + heads * value * hidden


def _windows(text: dict[str, Any], kind: str, count: int) -> list[int | None] | None:
    """The window of each layer, None for full attention; or None where the library decides."""
    if count > MOST_LAYERS:
        return None
    window = _number(text, "sliding_window")
    types = text.get("layer_types")
    if types is not None:
        windows = {"full_attention": None, "sliding_attention": window}
        if not isinstance(types, list) or len(types) != count:
            return None
        if not all(isinstance(name, str) and name in windows for name in types):
            return None
        if window is None and "sliding_attention" in types:
            return None
        return [windows[name] for name in types]
    if text.get("use_sliding_window"):
        return None
    if window is None or kind in _KNOWN - _ALTERNATING - _EVERY_LAYER - {"gemma3_text"}:
        return [None] * count
    period = 2  # every so many layers, one has full attention
    if kind == "gemma3_text":
        period = _number(text, "sliding_window_pattern") or 6
    elif kind in _EVERY_LAYER:
        period = count + 1
    sliding: list[int | None] = [window] * count
    for index in range(period - 1, count, period):
        sliding[index] = None
    return sliding


def _feed_forward(
    text: dict[str, Any], kind: str, count: int, hidden: int
) -> tuple[int, int | None]:
    """Parameters of routed experts, and of everything else in the feed-forward layers, None if
    unknown. Each is a gated MLP: three matrices."""
    width, experts = _number(text, "intermediate_size"), _experts(text)
    if experts is None:
        return 0, None if width is None else 3 * count * hidden * width
    narrow = _number(text, "moe_intermediate_size")
    if narrow is None and kind in ("gpt_oss", "mixtral"):
        narrow = width
    if narrow is None or text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        return 0, None
    first = _number(text, "first_k_dense_replace") or 0
    shared = (_number(text, "n_shared_experts") or 0) * 3 * hidden * narrow
    router = hidden * experts
    sparse = count - first
    dense = first * 3 * hidden * (width or 0) + sparse * (router + shared)
    return sparse * experts * 3 * hidden * narrow, dense


def _experts(text: dict[str, Any]) -> int | None:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if count := _number(text, name):
            return count
    return None


def _number(text: dict[str, Any], name: str) -> int | None:
    """A positive integer of the config; None for anything else, which others may have written."""
    value = text.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value < _LARGEST else None
