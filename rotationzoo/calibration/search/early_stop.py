"""Passes through a model that end once its attention has shown what they are for."""

from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from rotationzoo.model.capture import decoder
from rotationzoo.model.loading import input_device


class _EnoughSeen(Exception):
    """Ends a pass through the model, from inside an attention module."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module


def stop_pass(module: torch.nn.Module) -> NoReturn:
    """End the pass of `run_decoder_until_stopped`, from inside the attention of `module`."""
    raise _EnoughSeen(module)


def run_decoder_until_stopped(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Run the decoder on rows of token ids `[B, T]`, to its end or until `stop_pass`.

    transformers undoes what a pass has set up even if it fails, but accelerate does not: a module
    whose weights were fetched for this pass would keep them in memory. The modules that the pass
    was in are therefore left as accelerate leaves them.
    """
    tower = decoder(model)
    try:
        tower(input_ids=ids.to(input_device(model)), use_cache=False)
    except _EnoughSeen as enough:
        for module in _modules_around(tower, enough.module):
            hook: Any = getattr(module, "_hf_hook", None)
            if hook is not None:
                hook.post_forward(module, None)


def _modules_around(tower: torch.nn.Module, inner: torch.nn.Module) -> list[torch.nn.Module]:
    """A module of the tower and those that contain it, innermost first."""
    name = next(name for name, module in tower.named_modules() if module is inner)
    parts = name.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return [*map(tower.get_submodule, names), tower]
