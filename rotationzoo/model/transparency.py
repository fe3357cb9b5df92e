"""The check that a model computes the same while its attention is captured."""

from typing import TYPE_CHECKING

import torch

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model.capture import Intercept, attend_as_is, intercept

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_transparent(
    model: "PreTrainedModel", ids: torch.Tensor, function: Intercept = attend_as_is
) -> None:
    """Raise `UnsupportedModel` unless the logits of `ids` `[B, T]` are the same with and without
    capture.

    `function` may look at what is captured, and must not change the output. Another pass would
    fetch all weights that are offloaded again. On a GPU, where kernels may not be deterministic,
    logits may differ by as much as two plain runs do.
    """

    def logits() -> torch.Tensor:
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return result

    plain = logits()
    with intercept(model, function):
        captured = logits()
    if torch.allclose(plain, captured, rtol=0, atol=0, equal_nan=True):
        return
    change = (plain - captured).abs().max().item()
    noise = (plain - logits()).abs().max().item()
    if not change <= noise:
        raise UnsupportedModel(
            f"capturing attention changes what {type(model).__name__} computes "
            f"(logits move by {change:.1e})",
            hint="report the model and the transformers version as an issue; its statistics would "
            "not be trustworthy",
        )
