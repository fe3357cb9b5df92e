"""Text that the model writes itself: prompts, and what it makes of them token by token, as a server would."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rotationzoo.artifact import digest
from rotationzoo.checkpoint import Checkpoint
from rotationzoo.collect import Progress, silent
from rotationzoo.models import input_device
from rotationzoo.source import Source, read_json

_SETTINGS = "generation_config.json"
_OWN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # draws from what the model predicts, and from all of it


def sampling(source: Source) -> dict[str, Any]:
    """How a model's makers say that it is to be sampled, or its bare predictions where they say nothing."""
    theirs = read_json(source.folder / _SETTINGS)
    return {name: theirs.get(name) or bare for name, bare in _OWN.items()}


def settings_hash(source: Source) -> str:
    """sha256 of all that the makers say of generation: penalties and end tokens decide what is written, too."""
    theirs = read_json(source.folder / _SETTINGS)
    theirs.pop("transformers_version", None)
    return digest(json.dumps(theirs, sort_keys=True).encode())


@torch.no_grad()
def write(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    length: int,
    tokens: int,
    batch: int,
    sampled: dict[str, Any],
    seed: int = 0,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> list[torch.Tensor]:
    """Texts `[T]`, each a prompt `[P]` and its continuation up to the model's end token or to `length` tokens in all.

    `batch` prompts are continued at a time, until the texts have `tokens` tokens or there are no more prompts.
    """
    texts, done = checkpoint.read_text() if checkpoint is not None else ([], 0)
    while (written := sum(map(len, texts))) < tokens and done * batch < len(prompts):
        progress("writing", written, tokens)
        texts += _go_on(model, prompts[done * batch : (done + 1) * batch], length, sampled, 1_000_003 * seed + done)
        done += 1
        if checkpoint is not None:
            checkpoint.save_text(texts, done)
    progress("writing", tokens, tokens)
    return texts


def _go_on(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], length: int, sampled: dict[str, Any], seed: int
) -> list[torch.Tensor]:
    width, device = max(map(len, prompts)), input_device(model)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # what a batch goes on from ends together
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        found: torch.Tensor = model.generate(  # type: ignore[operator]
            ids.to(device), attention_mask=mask.to(device), do_sample=True, use_cache=True, pad_token_id=0,
            max_new_tokens=length - min(map(len, prompts)), **sampled,
        )  # fmt: skip
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    end = torch.tensor([] if ends is None else ends, dtype=torch.long).flatten()
    texts = []
    for prompt, new in zip(prompts, found[:, width:].cpu(), strict=True):
        stops = torch.isin(new, end).nonzero()
        last = int(stops[0]) + 1 if len(stops) else len(new)
        texts.append(torch.cat([prompt, new[: min(last, length - len(prompt))]]))
    return texts
