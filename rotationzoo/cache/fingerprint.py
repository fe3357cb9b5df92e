"""What a stored prefix depends on: the weights that computed it, and the rotations and settings
that stored it."""

import hashlib
import json
from dataclasses import asdict, fields
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.cache.settings import Storage
from rotationzoo.rotations import Rotations

_SAMPLE = 64  # numbers at both ends of a weight that tell one model from another
# What does not change the keys and values of a model.
_UNIMPORTANT = "transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures"


def describe(storage: Storage, model: PreTrainedModel) -> dict[str, Any]:
    """What must be the same where a prefix is read again, by name, as JSON can hold it."""
    arm, windows = storage.arm, storage.windows
    options = {part.name: getattr(arm, part.name) for part in fields(arm)}
    del options["name"], options["rotations"]
    described = {
        "model": model_fingerprint(model),
        "rotations": rotations_fingerprint(arm.rotations),
        "codec": {"kind": type(arm).__name__, **asdict(windows.format)},
        **options,
        "sink": windows.sink,
        "recent": windows.recent,
        "block": storage.block_tokens,
    }
    # As it is after it was written and read.
    content: dict[str, Any] = json.loads(json.dumps(described))
    return content


def rotations_fingerprint(rotations: Rotations) -> str:
    """sha256 over every number that decides what is stored."""
    digest = hashlib.sha256()
    for layer, side, rotation in rotations.each():
        for name in ("matrix", "clip", "mean", "equalizer", "feedback"):
            tensor = getattr(rotation, name)
            if tensor is not None:
                digest.update(f"{layer} {side} {name} {list(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def model_fingerprint(model: PreTrainedModel) -> str:
    """sha256 over a model's config and a sample of each of its weights."""
    config = model.config.to_dict()
    known = {name: option for name, option in config.items() if name not in _UNIMPORTANT}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {list(weight.shape)}".encode())
        # Weights that accelerate keeps elsewhere cannot be looked at.
        if not weight.is_meta:
            flat = weight.detach().flatten()
            ends = torch.cat([flat[:_SAMPLE], flat[-_SAMPLE:]]).float().cpu()
            digest.update(ends.numpy().tobytes())
    return digest.hexdigest()
