"""The shape of a model as capacity planning sees it: what each layer caches, and what its weights
are made of."""

from dataclasses import dataclass


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
    """What a config tells about a model's cache and weights."""

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
