"""Whole models and rotations in float64, where the order of a sum moves no code.

A product of few rows sums in another order than one of many, and so do the kernels of other
processors. In float32 that moves a last bit, which may move a 2-bit code, and what later layers
store. What two ways compute in float64 differs by some 1e-15, too little to move anything.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rotationzoo.rotations import Rotations

CLOSE = 64 * torch.finfo(torch.float32).eps
"""How far logits may be apart, of the largest: the codec rounds rows to float32, so that one in a
hundred million is another last bit away, which a model multiplies by less than 64."""


def to_float64(rotations: Rotations) -> Rotations:
    """The same rotations, with which rows are rotated in float64."""
    return rotations.replace(
        lambda _, side, rotation: replace(rotation, matrix=rotation.matrix.double())
    )


class _Promotion(TorchFunctionMode):
    """Lets the code of models compute in float64 what it computes in float32 whatever their type
    is: norms, softmax, linear attention. The codec's code is not touched."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asks = func is torch.Tensor.float or _asks_for_float32(*args, *kwargs.values())
        if not asks or not _is_float64(args) or not _is_called_by_a_model():
            return func(*args, **kwargs)
        if func is torch.Tensor.float:
            return args[0]
        args = [torch.float64 if each is torch.float32 else each for each in args]
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _is_float64(args) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64


def _asks_for_float32(*arguments) -> bool:
    return any(each is torch.float32 for each in arguments)


def _is_called_by_a_model() -> bool:
    """Whether the code outside torch that called the function is that of transformers."""
    frame = sys._getframe(2)
    while (name := frame.f_globals.get("__name__", "")).startswith("torch."):
        frame = frame.f_back
    return name.startswith("transformers.")


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Models of float64 weights compute nothing in float32."""
    with _Promotion():
        yield


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """The same around every test of a room whose conftest.py has this fixture."""
    with all_in_float64():
        yield
