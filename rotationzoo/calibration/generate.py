"""Text that the model writes itself: prompts, continued token by token as a server would."""

from collections.abc import Sequence
from dataclasses import dataclass
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
# Draws from all of what the model predicts, as it predicts it.
_BARE_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
# Logits of two passes over one text may differ by this much of their spread: up to 4e-5 in float32
# and 0.05 in bfloat16 where all is well, else 0.9 and more.
_TOLERANCE = 0.2
_SEED_STRIDE = 1_000_003  # between seeds: batches of one seed do not meet those of the next
# What a model's own settings may not change: one text of each prompt, drawn token by token to its
# end.
_PLAIN: dict[str, Any] = {
    "do_sample": True,
    "num_beams": 1,
    "use_cache": True,
    "return_dict_in_generate": False,
    "max_time": None,
    "stop_strings": None,
    "prompt_lookup_num_tokens": None,
}


@dataclass(frozen=True)
class WritingSettings:
    """How much a model writes, and how."""

    length: int
    """The most tokens of a text, its prompt included."""
    tokens: int
    """Writing ends when there are so many in all, without the start tokens of each text."""
    batch: int
    """Prompts that are continued at a time."""
    sampling: dict[str, Any]
    """As `read_sampling` returns it."""
    end_tokens: list[int]
    start_tokens: int = 0
    """How many tokens the tokenizer puts before every text."""
    seed: int = 0


def read_sampling(source: Source) -> dict[str, Any]:
    """The sampling that a model's makers recommend; where they say nothing or 0, that of its bare
    predictions."""
    recommended = read_json(source.folder / _SETTINGS)
    return {name: recommended.get(name) or bare for name, bare in _BARE_SAMPLING.items()}


def hash_settings(source: Source) -> str:
    """The hash of all that the makers say of generation: penalties and end tokens decide what is
    written, too."""
    settings = read_json(source.folder / _SETTINGS)
    settings.pop("transformers_version", None)
    return digest(settings)


def find_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens after which a text is over: makers name them in one of three places."""
    text_config = model.config.get_text_config(decoder=True)
    for settings in (model.generation_config, text_config, tokenizer):
        ids: int | list[int] | None = getattr(settings, "eos_token_id", None)
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


@torch.no_grad()
def write_texts(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    settings: WritingSettings,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> list[torch.Tensor]:
    """Texts `[T]`, each a prompt `[P]` and its continuation up to an end token, or to at most
    `settings.length` tokens in all; until there are enough tokens, or no more prompts.

    Raises `RotationZooError` where the model cannot write.
    """
    texts = checkpoint.read_text() if checkpoint is not None else []
    # Tried on the model at hand: which layers take padding for text is on no list.
    batch = _usable_batch(model, prompts[0], settings.batch)
    while len(texts) < len(prompts):
        written = sum(map(len, texts)) - settings.start_tokens * len(texts)
        if written >= settings.tokens:
            break
        progress("writing", written, settings.tokens)
        next_prompts = prompts[len(texts) : len(texts) + batch]
        seed = _SEED_STRIDE * settings.seed + len(texts)
        texts += _continue_prompts(model, next_prompts, settings, seed)
        if checkpoint is not None:
            checkpoint.save_text(texts)
    progress("writing", settings.tokens, settings.tokens)
    return texts


def _usable_batch(model: PreTrainedModel, prompt: torch.Tensor, batch: int) -> int:
    """`batch`, or 1 where a model takes the padding beside a longer prompt for text, as layers may
    that sum up what was before.

    What the model predicts token by token is compared with one pass over the same text. Raises
    `RotationZooError` where they differ even for a prompt alone, or are not finite.
    """
    short = prompt[: len(prompt) // 2 + 1]
    for prompts, size in (([short, prompt], batch), ([short], 1)):
        if _decodes_as_in_one_pass(model, prompts):
            return size
    raise RotationZooError(
        f"transformers {transformers.__version__} makes other text of this model token by token "
        "than in one pass",
        hint="upgrade transformers, or give text with --data",
    )


def _decodes_as_in_one_pass(model: PreTrainedModel, prompts: Sequence[torch.Tensor]) -> bool:
    """Whether two tokens after the first prompt, the others beside it, are predicted as in one pass
    over its text."""
    options = _PLAIN | {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    generated = model.generate(  # type: ignore[operator]
        **_pad_left(model, prompts), **options, output_logits=True, max_new_tokens=2
    )
    step_by_step = torch.stack([logits[0].float().cpu() for logits in generated.logits])
    ids = torch.cat([prompts[0], generated.sequences[0, -2:-1].cpu()])
    output = model(input_ids=ids[None].to(input_device(model)), use_cache=False)
    at_once = output.logits[0, -2:].float().cpu()
    if not torch.isfinite(at_once).all():
        raise RotationZooError(
            "the model's predictions are not finite",
            hint="run again with --dtype float32; if that does not help, the weights are damaged",
        )
    spread = torch.dist(at_once, at_once.mean())
    return bool(torch.dist(step_by_step, at_once) < _TOLERANCE * spread)


def _pad_left(model: PreTrainedModel, prompts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The prompts as one batch, padded on the left: the model continues their ends."""
    width, device = max(map(len, prompts)), input_device(model)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return {"inputs": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": 0}


def _continue_prompts(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], settings: WritingSettings, seed: int
) -> list[torch.Tensor]:
    """Each prompt with its continuation, cut after the first end token."""
    width = max(map(len, prompts))
    # The user's own random draws stay as they were.
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        generated: torch.Tensor = model.generate(  # type: ignore[operator]
            **_pad_left(model, prompts),
            **_PLAIN,
            **settings.sampling,
            max_new_tokens=settings.length - width,
            eos_token_id=settings.end_tokens or None,
        )
    end_tokens = torch.tensor(settings.end_tokens, dtype=torch.long)
    texts = []
    for prompt, continuation in zip(prompts, generated[:, width:].cpu(), strict=True):
        ends = torch.isin(continuation, end_tokens).nonzero()
        if len(ends):
            continuation = continuation[: int(ends[0]) + 1]
        texts.append(torch.cat([prompt, continuation]))
    return texts
