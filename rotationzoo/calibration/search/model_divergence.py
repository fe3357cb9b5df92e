"""How far the model's predictions diverge when it reads its cache through the codec."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from rotationzoo import ranks
from rotationzoo.cache.arm import Arm
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.search.shelf import HOST_SHARE
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.placement import free_memory
from rotationzoo.model.prediction import HiddenStates, run_decoder
from rotationzoo.rotations import Rotations


@dataclass(frozen=True)
class ModelDivergence:
    """Measures rotations by a model's predictions on `texts` `[T]`.

    Texts too short to have a quantized position are skipped. `batch` texts of equal length share a
    pass through the model. What the exact model's decoder makes of a text is kept in host memory,
    where there is room for it, so the exact model reads every text once, however many candidates
    are measured, and whenever.
    """

    model: PreTrainedModel
    geometry: Geometry
    cache: Cache
    group_size: int | None
    texts: Sequence[torch.Tensor]
    batch: int = 1
    _kept: dict[tuple[int, ...], HiddenStates] = field(default_factory=dict, repr=False)

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

        It is averaged over the positions that read quantized tokens. `tell` hears on how many more
        texts a candidate has been measured.
        """
        texts = self.measured_texts
        # Processes share the batches of texts. What another measures is zero here, and added.
        divergences = torch.zeros(len(candidates), len(texts), dtype=torch.float64)
        for numbers in ranks.share(list(self._batches(texts))):
            ids = torch.stack([texts[number] for number in numbers])
            exact = self._exact(tuple(numbers), ids)
            for row, rotations in enumerate(candidates):
                simulation = simulate(rotations, self.geometry, self.cache, self.group_size)
                with simulation.running(self.model):
                    read = self._predicting(run_decoder(self.model, ids))
                divergences[row, numbers] = _mean_divergence(exact, read).cpu()
                ranks.beat()
                if tell is not None:
                    tell(len(numbers))
        return ranks.all_reduce(divergences).cpu()

    def _batches(self, texts: Sequence[torch.Tensor]) -> Iterator[list[int]]:
        """The numbers of the texts, in batches of equal length."""
        for length in dict.fromkeys(map(len, texts)):
            alike = [number for number, text in enumerate(texts) if len(text) == length]
            for start in range(0, len(alike), self.batch):
                yield alike[start : start + self.batch]

    def _exact(self, numbers: tuple[int, ...], ids: torch.Tensor) -> HiddenStates:
        """What the exact model makes of a batch of texts, on the device that it predicts on."""
        kept = self._kept.get(numbers)
        if kept is None:
            states = self._predicting(run_decoder(self.model, ids))
            size = states.output.last_hidden_state.nbytes
            if size <= HOST_SHARE * free_memory("cpu"):
                self._kept[numbers] = _moved(states, torch.device("cpu"))
            return states
        return _moved(kept, kept.ids.device)

    def _predicting(self, states: HiddenStates) -> HiddenStates:
        """The states of the positions alone that read quantized tokens."""
        first = self.cache.first_quantized
        part = copy.copy(states.output)
        part["last_hidden_state"] = part["last_hidden_state"][:, first:].clone()
        return replace(states, ids=states.ids[:, first:], output=part)


def simulate(
    rotations: Rotations, geometry: Geometry, cache: Cache, group_size: int | None
) -> Simulation:
    """A model whose layers all read their cache in 2 bits."""
    layers = {layer.index for layer in geometry}
    return Simulation(Arm("candidate", rotations, group_size), cache, geometry, layers)


def _moved(states: HiddenStates, device: torch.device) -> HiddenStates:
    """The hidden states on a device; token ids stay where the model reads them."""
    part = copy.copy(states.output)
    part["last_hidden_state"] = part["last_hidden_state"].to(device)
    return replace(states, output=part)


def _mean_divergence(exact: HiddenStates, simulated: HiddenStates) -> torch.Tensor:
    """Mean KL divergence `[B]`, float64, of the predictions at all positions.

    It is computed in blocks of positions, because float32 copies of all logits would be the largest
    tensors of a job.
    """
    count = exact.ids.shape[1]
    total: torch.Tensor | None = None
    blocks = zip(exact.blocks(0, count), simulated.blocks(0, count), strict=True)
    for (_, exact_logits), (_, simulated_logits) in blocks:
        p = exact_logits.float().log_softmax(-1)
        q = simulated_logits.float().log_softmax(-1)
        by_position = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        block = by_position.double().sum(-1)
        total = block if total is None else total + block
    assert total is not None
    return total / count
