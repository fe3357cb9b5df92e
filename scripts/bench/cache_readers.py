"""What the answer benchmarks share: models that read their tokens through some cache."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from loading import Loaded
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers_caches import CACHES, ThroughCache

from rotationzoo.evaluation.forward import token_losses
from rotationzoo.recall.answers import Answers, read_answers
from rotationzoo.recall.prompts import Prompt
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.kivi import KiviArm
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.simulation.size import arm_bits

KIVI_GROUPS = (32, 64)


@dataclass(frozen=True)
class Reader:
    """One arm on one model: a model to call, the context to call it in, and its bits per element
    with exact tokens counted."""

    model: Any
    context: Callable[[], Any]
    bits: float


def answers_of(model: Any, prompts: Sequence[Prompt], batch: int = 1) -> Answers:
    """What a model answers, or whatever is called in its place."""
    reader = None if isinstance(model, PreTrainedModel) else model
    return read_answers(model, prompts, batch, reader)


def losses_of(model: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    """`token_losses` of a model, or of whatever is called in its place: float32
    `[B, T - start - 1]`."""
    if isinstance(model, PreTrainedModel):
        return token_losses(model, ids, start)
    kept = ids.shape[1] - start
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, -kept:-1]
    targets = ids[:, start + 1 :].to(logits.device)
    rows = zip(logits.float(), targets, strict=True)
    losses = [cross_entropy(*row, reduction="none") for row in rows]
    return torch.stack(losses)


def exact(loaded: Loaded) -> Reader:
    """The model itself."""
    return Reader(loaded.model, nullcontext, 16)


def simulated(loaded: Loaded, arm: Arm, cache: CacheLayout, length: int) -> Reader:
    """The model, reading what an arm stores; `length` tokens are those of which bits are told."""
    layers = {layer.index for layer in loaded.geometry}
    simulation = Simulation(arm, cache, loaded.geometry, layers)
    bits = arm_bits(loaded.geometry, arm, cache, length)
    return Reader(loaded.model, lambda: simulation.running(loaded.model), bits)


def through(loaded: Loaded, name: str, cache: CacheLayout, length: int) -> Reader:
    """The model, reading one of transformers' own `CACHES`. It keeps as many tokens exact as
    `cache`, all of them at the end."""
    quantized = replace(CACHES[name], residual=cache.sink + cache.recent)
    bits = quantized.bits_per_element(length)
    return Reader(ThroughCache(loaded.model, quantized), nullcontext, bits)


def list_kivi(arms: list[Arm]) -> list[Arm]:
    """KIVI with both group sizes, without a rotation and, if there is an artifact, with the first
    one's."""
    plain = next(arm for arm in arms if arm.name == "identity")
    bases = {"": plain}
    if arms[0] is not plain:
        bases[f"+{arms[0].name}"] = arms[0]
    kivi: list[Arm] = []
    for suffix, arm in bases.items():
        for size in KIVI_GROUPS:
            name = f"kivi-{size}{suffix}"
            kivi.append(KiviArm(name, arm.rotations, tokens=size, channels=size))
    return kivi
