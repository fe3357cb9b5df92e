"""A model's predictions: logits in blocks of positions, and greedy continuations."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from rotationzoo.errors import Unsound
from rotationzoo.model.capture import Call, cache_argument, decoder, intercept, returned_cache
from rotationzoo.model.changing_rope import reading_whole
from rotationzoo.model.loading import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_LOGITS = 2**26
"""Logits of a block: 256 MB in float32. A vocabulary of 152,000 makes blocks of 441 positions."""


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states of rows of token ids, the input of a model's head."""

    model: "PreTrainedModel"
    ids: torch.Tensor
    output: Any  # the decoder's own output, whose `last_hidden_state` is `[B, T, hidden]`

    def logits(self, positions: slice | list[int]) -> torch.Tensor:
        """The logits `[B, P, vocabulary]` at some positions, by the model's own forward on the
        decoder's output, because some heads cap (Gemma) or scale (Granite, Cohere) their logits."""
        part = copy.copy(self.output)
        part["last_hidden_state"] = self.output.last_hidden_state[:, positions]
        with returning([decoder(self.model)], part):
            result = self.model(input_ids=self.ids[:, positions], use_cache=False)
        return cast(torch.Tensor, result.logits)

    def row(self, number: int) -> "HiddenStates":
        """The hidden states of one row of the batch."""
        part = copy.copy(self.output)
        part["last_hidden_state"] = self.output.last_hidden_state[number : number + 1]
        return replace(self, ids=self.ids[number : number + 1], output=part)

    def blocks(self, start: int, stop: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The positions from `start` to `stop` in blocks, each with logits `[B, P, vocabulary]`."""
        vocabulary: int = self.model.config.get_text_config(decoder=True).vocab_size
        size = max(1, BLOCK_LOGITS // (vocabulary * len(self.ids)))
        for first in range(start, stop, size):
            positions = slice(first, min(first + size, stop))
            yield positions, self.logits(positions)


def run_decoder(model: "PreTrainedModel", ids: torch.Tensor, cache: Any = None) -> HiddenStates:
    """Run a model over ids `[B, T]`, after those in a `cache`, and return its decoder's output."""
    given = {} if cache is None else cache_argument(model, cache)
    ids = ids.to(input_device(model))
    # A slice: given a number, some decoders drop earlier positions (Gemma 4), and a tensor may be
    # on another device than the head.
    last = slice(ids.shape[1] - 1, None)
    # Inside `intercept`, a long row's masks are made block by block.
    running = intercept(model, Call.run), reading_whole(model)
    with keeping_outputs([decoder(model)]) as outputs, running[0], running[1]:
        model(input_ids=ids, use_cache=cache is not None, logits_to_keep=last, **given)
    return HiddenStates(model, ids, outputs[0])


def divergence_of(exact: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`KL(exact || other)` `[...]`, in nats, from logits `[..., vocabulary]`."""
    p, q = (logits.float().log_softmax(-1) for logits in (exact, other))
    return (p.exp() * (p - q)).sum(-1)


def doubt_loss(loss: float, vocabulary: int) -> list[str]:
    """A warning if a model with this loss in nats predicts worse than a uniform guess."""
    words = f"with {loss:.1f} nats a token instead of {math.log(vocabulary):.1f}"
    words = f"the model predicts this text worse than chance, {words}: its weights, its start"
    return [f"{words} tokens or the text may be wrong"] if loss > math.log(vocabulary) else []


def check_finite(model: "PreTrainedModel", found: torch.Tensor, compute: Callable[[], Any]) -> None:
    """Raise `Unsound`, naming the first bad layer, for NaN or inf (but not for logits of -inf)."""
    if (found < math.inf).all():  # False for a NaN
        return
    with keeping_outputs(decoder_layers(model)) as outputs, intercept(model, Call.run):
        compute()
    states = [tree_leaves(each)[0] for each in outputs]  # the first of a tuple
    wrong = [number for number, each in enumerate(states) if not each.isfinite().all()]
    place = f"layer {wrong[0]}" if wrong else "what follows the last layer"
    problem = f"{place} of {type(model).__name__} returns numbers that are not finite"
    coarse = "" if model.dtype.itemsize > 2 else "add: --dtype float32; if that does not help, "
    raise Unsound(problem, hint=f"{coarse}fetch or save the weights again: they are damaged")


def continue_greedily(
    model: "PreTrainedModel", ids: torch.Tensor, cache: Any, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue ids `[B, T]` greedily. Returns tokens `[B, N]` and all logits `[B, N, V]`."""
    steps: list[torch.Tensor] = []
    for _ in range(tokens):
        given = cache_argument(model, cache)
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **given)
        cache = returned_cache(output)
        steps.append(output.logits[:, -1:])
        ids = steps[-1].argmax(-1).to(ids.device)
    logits = torch.cat(steps, dim=1)
    return logits.argmax(-1).to(ids.device), logits


def decoder_layers(model: "PreTrainedModel") -> list[torch.nn.Module]:
    """The layers of the text decoder, in order; none if no list of them is found."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in decoder(model).modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    return []


@contextmanager
def keeping_outputs(modules: Iterable[torch.nn.Module]) -> Iterator[list[Any]]:
    """Inside the block, each call of a module adds its output to the list."""
    outputs: list[Any] = []
    with ExitStack() as hooks:
        for module in modules:
            hook = module.register_forward_hook(lambda *call: outputs.append(call[-1]))
            hooks.enter_context(hook)
        yield outputs


@contextmanager
def counting_layers(model: "PreTrainedModel", tell: Callable[[float], None]) -> Iterator[None]:
    """Inside the block, `tell` gets the share of decoder layers done, after each of them."""
    with ExitStack() as hooks:
        for count, layer in enumerate(layers := decoder_layers(model), 1):
            hook = partial(lambda part, *_: tell(part), count / len(layers))
            hooks.enter_context(layer.register_forward_hook(hook))
        yield


@contextmanager
def returning(modules: Iterable[torch.nn.Module], output: Any) -> Iterator[None]:
    """Inside the block, the modules compute nothing and return `output`."""
    with ExitStack() as patches:
        for module in modules:
            # This restores a forward that accelerate has put on the module itself.
            patches.enter_context(patch.object(module, "forward", lambda *args, **kwargs: output))
        yield
