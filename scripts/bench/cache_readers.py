"""What the answer benchmarks share: models that read their tokens through some cache."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from loading import Loaded
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers_caches import CACHES, ThroughCache

from rotationzoo.artifact.measured import AboutArm
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.size import codec_bits
from rotationzoo.evaluation.arms import Arm
from rotationzoo.evaluation.forward import token_losses
from rotationzoo.recall.answers import Answers, read_answers
from rotationzoo.recall.prompts import Prompt
from rotationzoo.rotations import Rotations
from rotationzoo.simulation.rivals import RivalCodec, store_as_kivi
from rotationzoo.simulation.simulated import SimulatedCodec, Simulation

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
    simulation = Simulation(arm.codec, cache, loaded.geometry, layers)
    bits = codec_bits(loaded.geometry, arm.codec, cache, length)
    return Reader(loaded.model, lambda: simulation.running(loaded.model), bits)


def through(loaded: Loaded, name: str, cache: CacheLayout, length: int) -> Reader:
    """The model, reading one of transformers' own `CACHES`. It keeps as many tokens exact as
    `cache`, all of them at the end."""
    quantized = replace(CACHES[name], residual=cache.sink + cache.recent)
    bits = quantized.bits_per_element(length)
    return Reader(ThroughCache(loaded.model, quantized), nullcontext, bits)


def arm_of(name: str, rotations: Rotations, **settings: Any) -> Arm:
    """An arm with a codec of these rotations and settings."""
    return rival_of(name, RotatedCodec(rotations, **settings))


def rival_of(name: str, codec: SimulatedCodec) -> Arm:
    """An arm that is no artifact's."""
    return Arm(AboutArm(name=name, kind="baseline"), codec)


def list_kivi() -> list[Arm]:
    """KIVI with both group sizes."""
    arms = []
    for size in KIVI_GROUPS:
        codec = RivalCodec(partial(store_as_kivi, tokens=size, channels=size))
        arms.append(rival_of(f"kivi-{size}", codec))
    return arms
