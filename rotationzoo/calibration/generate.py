"""Text that the model writes itself: prompts, and what it makes of them token by token, as a server
would."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.errors import RotationZooError
from rotationzoo.model.files import read_json
from rotationzoo.model.loading import input_device
from rotationzoo.model.source import Source
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import digest

_SETTINGS = "generation_config.json"
_OWN = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
}  # draws from what the model predicts, and from all of it
# of the spread of the scores: up to 4e-5 in float32 and 0.05 in bfloat16 where all is well, else
# 0.9 and more
_ALIKE = 0.2
_PLAIN: dict[str, Any] = {
    "do_sample": True, "num_beams": 1, "use_cache": True, "return_dict_in_generate": False, "max_time": None,
    "stop_strings": None, "prompt_lookup_num_tokens": None,
}  # fmt: skip
"""What a model's own settings may not change: one text of each prompt, drawn token by token to its
end."""


def sampling(source: Source) -> dict[str, Any]:
    """How a model's makers say that it is to be sampled, or its bare predictions where they say
    nothing or 0."""
    theirs = read_json(source.folder / _SETTINGS)
    return {name: theirs.get(name) or bare for name, bare in _OWN.items()}


def settings_hash(source: Source) -> str:
    """Of all that the makers say of generation: penalties and end tokens decide what is written,
    too."""
    theirs = read_json(source.folder / _SETTINGS)
    theirs.pop("transformers_version", None)
    return digest(theirs)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Those after which a text is over."""
    settings = (model.generation_config, model.config.get_text_config(decoder=True), tokenizer)
    found: Any = next(
        (
            ids
            for ids in (getattr(one, "eos_token_id", None) for one in settings)
            if ids is not None
        ),
        [],
    )
    return found if isinstance(found, list) else [found]


@torch.no_grad()
def write(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    length: int,
    tokens: int,
    batch: int,
    sampled: dict[str, Any],
    ends: list[int],
    start: int = 0,
    seed: int = 0,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> list[torch.Tensor]:
    """Texts `[T]`, each a prompt `[P]` and its continuation up to an end token, or to at most
    `length` tokens in all.

    `batch` prompts are continued at a time, until there are `tokens` tokens, without the `start` of
    each text, or no more prompts. Raises `RotationZooError` where the model cannot write.
    """
    texts = checkpoint.read_text() if checkpoint is not None else []
    batch = _borne(model, prompts[0], batch)
    while (written := sum(map(len, texts)) - start * len(texts)) < tokens and len(texts) < len(
        prompts
    ):
        progress("writing", written, tokens)
        some = prompts[len(texts) : len(texts) + batch]
        texts += _go_on(model, some, length, sampled, ends, 1_000_003 * seed + len(texts))
        if checkpoint is not None:
            checkpoint.save_text(texts)
    progress("writing", tokens, tokens)
    return texts


def _borne(model: PreTrainedModel, prompt: torch.Tensor, batch: int) -> int:
    """`batch`, or 1 where a model takes the padding beside a longer prompt for text, as layers may
    that sum up what was before.

    What it predicts token by token is held against a pass over the same text. Raises
    `RotationZooError` where they differ even for a prompt alone, or are not finite.
    """
    short = prompt[: len(prompt) // 2 + 1]
    for prompts, size in (([short, prompt], batch), ([short], 1)):
        options = _PLAIN | {
            "do_sample": False,
            "return_dict_in_generate": True,
            "eos_token_id": None,
        }
        found = model.generate(
            **_padded(model, prompts), **options, output_logits=True, max_new_tokens=2
        )  # type: ignore[operator]
        step_by_step = torch.stack([logits[0].float().cpu() for logits in found.logits])
        ids = torch.cat([short, found.sequences[0, -2:-1].cpu()])
        at_once = (
            model(input_ids=ids[None].to(input_device(model)), use_cache=False)
            .logits[0, -2:]
            .float()
            .cpu()
        )
        if not torch.isfinite(at_once).all():
            raise RotationZooError(
                "the model's predictions are not finite",
                hint="run again with --dtype float32; if that does not help, the weights are damaged",
            )
        if torch.dist(step_by_step, at_once) < _ALIKE * torch.dist(at_once, at_once.mean()):
            return size
    raise RotationZooError(
        f"transformers {transformers.__version__} makes other text of this model token by token than in one pass",
        hint="upgrade transformers, or give text with --data",
    )


def _padded(model: PreTrainedModel, prompts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The prompts as one batch, whose ends are what is gone on from."""
    width, device = max(map(len, prompts)), input_device(model)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return {"inputs": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": 0}


def _go_on(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    length: int,
    sampled: dict[str, Any],
    ends: list[int],
    seed: int,
) -> list[torch.Tensor]:
    width = max(map(len, prompts))
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        found: torch.Tensor = model.generate(  # type: ignore[operator]
            **_padded(model, prompts),
            **_PLAIN,
            **sampled,
            max_new_tokens=length - width,
            eos_token_id=ends or None,
        )
    texts = []
    for prompt, new in zip(prompts, found[:, width:].cpu(), strict=True):
        stops = torch.isin(new, torch.tensor(ends, dtype=torch.long)).nonzero()
        texts.append(torch.cat([prompt, new[: int(stops[0]) + 1 if len(stops) else None]]))
    return texts
