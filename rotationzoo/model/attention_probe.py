"""A model whose attention reads random rows that do not depend on the position: it shows what norms
and the rotary function do between the projections and the attention function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.model.capture import Attention, decoder, intercept
from rotationzoo.model.loading import input_device

_DRAWS = 16
_FAR = 8191  # a position at which slow pairs have moved; the model's last one, where that is known

Vectors = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> queries `[N, H_q, T, D]` and keys `[N, H_kv, T, D]`, float64 on the CPU."""


@dataclass
class AttentionProbe:
    """Runs a model whose attention modules get random rows in place of what their linear maps
    compute. Norms and the rotary function are the model's own."""

    model: PreTrainedModel
    modules: dict[int, torch.nn.Module] = field(default_factory=dict)
    """Layer -> its attention module."""

    def __post_init__(self) -> None:
        self._attended: set[int] = set()  # modules whose attention function has run
        self._run(count=1)

    def run(self, scale: bool) -> Vectors:
        """Queries and keys of each layer at the positions 0, 1 and a far one. With `scale`, every
        output of a linear map is multiplied by a random factor of its channel."""
        self._attended = set()
        with _replaced_maps(list(self.modules.values()), self._stand_in(scale)):
            return self._run(_DRAWS)

    def _run(self, count: int) -> Vectors:
        """Run the decoder on `count` rows of equal tokens, and record what its attention function
        gets."""
        vectors: Vectors = {}

        def record(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attend: Attention,
        ) -> torch.Tensor:
            self.modules[layer] = attend.module
            self._attended.add(id(attend.module))
            vectors[layer] = query.double().cpu(), key.double().cpu()
            # The output is not looked at.
            batch, heads, length, _ = query.shape
            return query.new_zeros(batch, length, heads, value.shape[-1])

        ids = torch.zeros(count, 3, dtype=torch.long, device=input_device(self.model))
        config = self.model.config.get_text_config(decoder=True)
        last = getattr(config, "max_position_embeddings", None)
        far = last - 1 if isinstance(last, int) else _FAR
        positions = torch.tensor([[0, 1, far]], device=ids.device).expand(count, -1)
        with intercept(self.model, record):
            decoder(self.model)(input_ids=ids, position_ids=positions, use_cache=False)
        return vectors

    def _stand_in(self, scale: bool) -> Callable[[torch.nn.Module, torch.nn.Module], Any]:
        """A function from an attention module and one of its linear maps to the map's stand-in."""
        residual: dict[int, torch.dtype] = {}

        def stand_in(attention: torch.nn.Module, linear: Any) -> Any:
            # From its place, so that both runs draw the same rows.
            generator = torch.Generator().manual_seed(linear.out_features)
            rows = torch.randn(_DRAWS, 1, linear.out_features, generator=generator)
            factors = torch.rand(linear.out_features, generator=generator) + 0.5

            def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
                if id(attention) in self._attended:
                    # The output projection. Other layers need their usual type.
                    shape = (*hidden.shape[:-1], linear.out_features)
                    return hidden.new_zeros(shape, dtype=residual[id(attention)])
                residual.setdefault(id(attention), hidden.dtype)
                drawn = rows * factors if scale else rows
                return drawn.to(hidden.device).expand(-1, hidden.shape[1], -1)

            return forward

        return stand_in


@contextmanager
def _replaced_maps(
    modules: list[torch.nn.Module], stand_in: Callable[[torch.nn.Module, torch.nn.Module], Any]
) -> Iterator[None]:
    """Inside the block, the linear maps of the modules are replaced."""
    replaced: list[tuple[Any, Any]] = []
    try:
        for module in modules:
            for part in module.modules():
                if hasattr(part, "in_features"):
                    replaced.append((part, part.__dict__.get("forward")))
                    untyped: Any = part
                    untyped.forward = stand_in(module, part)
        yield
    finally:
        for part, before in replaced:
            if before is None:
                del part.forward  # uncovers the method of the class
            else:  # accelerate's, which loads offloaded weights
                part.forward = before
