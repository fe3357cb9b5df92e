"""How far the model's predictions diverge when it reads its cache through the codec."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.arm import Arm
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.windows import Cache
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.loading import input_device
from rotationzoo.rotations import Rotations

POSITIONS = 256  # whose predictions are compared at a time


@dataclass(frozen=True)
class ModelDivergence:
    """Measures rotations by a model's predictions on `texts` `[T]`.

    Texts too short to have a quantized position are skipped.
    """

    model: PreTrainedModel
    geometry: Geometry
    cache: Cache
    group_size: int | None
    texts: Sequence[torch.Tensor]

    @property
    def measured_texts(self) -> list[torch.Tensor]:
        """The texts that are not skipped."""
        return [text for text in self.texts if len(text) > self.cache.first_quantized]

    @torch.no_grad()
    def measure(
        self, candidates: Sequence[Rotations], tell: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """`KL(exact || candidate)` of the model's predictions, in nats: `[candidates, texts]`,
        float64.

        It is averaged over the positions that read quantized tokens. `tell` hears the number of
        candidates that have read one more text.
        """
        by_text = []
        for text in self.measured_texts:
            exact = self._predict(text)
            by_candidate = []
            for rotations in candidates:
                simulation = simulate(rotations, self.geometry, self.cache, self.group_size)
                with simulation.running(self.model):
                    by_candidate.append(_mean_divergence(exact, self._predict(text)))
            by_text.append(torch.stack(by_candidate))
            if tell is not None:
                tell(len(candidates))
        return torch.stack(by_text, dim=1)

    def _predict(self, text: torch.Tensor) -> torch.Tensor:
        """Logits `[Q, vocabulary]` at the positions that read quantized tokens."""
        count = len(text) - self.cache.first_quantized
        ids = text[None].to(input_device(self.model))
        output = self.model(input_ids=ids, use_cache=False, logits_to_keep=count)
        # Sliced again, for models that return all logits whatever `logits_to_keep` says.
        logits: torch.Tensor = output.logits[0, -count:]
        return logits


def simulate(
    rotations: Rotations, geometry: Geometry, cache: Cache, group_size: int | None
) -> Simulation:
    """A model whose layers all read their cache in 2 bits."""
    layers = {layer.index for layer in geometry}
    return Simulation(Arm("candidate", rotations, group_size), cache, geometry, layers)


def _mean_divergence(exact: torch.Tensor, simulated: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence of predictions given as logits `[Q, vocabulary]`.

    It is computed in chunks of positions, because float32 copies of all logits would be the largest
    tensors of a job.
    """
    total = torch.zeros((), dtype=torch.float64)
    chunks = zip(torch.split(exact, POSITIONS), torch.split(simulated, POSITIONS), strict=True)
    for exact_logits, simulated_logits in chunks:
        p = exact_logits.float().log_softmax(-1)
        q = simulated_logits.float().log_softmax(-1)
        by_position = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        total += by_position.double().sum().cpu()
    return total / len(exact)
