"""Tensors as bytes, in which processes send each other their results."""

from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import load, save


def pack(results: Sequence[Mapping[str, torch.Tensor]]) -> bytes:
    """Results as bytes. Each is a table of tensors by name, at least one."""
    tensors = {}
    for number, result in enumerate(results):
        for name, tensor in result.items():
            # A copy, because safetensors refuses tensors that share memory.
            copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            tensors[f"{number} {name}"] = copy
    return save(tensors)


def unpack(content: bytes) -> list[dict[str, torch.Tensor]]:
    """The results that `pack` was given."""
    results: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in load(content).items():
        number, name = key.split(" ", 1)
        results.setdefault(int(number), {})[name] = tensor
    return [results[number] for number in sorted(results)]
