"""Calibration text that the model writes itself, continuing prompts token by token as a server
would."""

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
from rotationzoo.progress import Progress, Tokens, silent
from rotationzoo.recipe import digest

_SETTINGS = "generation_config.json"
# Samples from the model's predictions as they are: no temperature, no truncation.
_BARE_SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
# Two passes over the same text may differ in their logits by this fraction of the logits' spread.
# Measured: up to 4e-5 in float32 and 0.05 in bfloat16 for a sound model, 0.9 and more otherwise.
_TOLERANCE = 0.2
_SEED_STRIDE = 1_000_003  # keeps the batches of one seed apart from the next seed's
# Generation settings that a model's makers cannot override: exactly one text per prompt, sampled
# token by token to its end.
PLAIN: dict[str, Any] = {
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
    """How much text a model writes, and how it is sampled."""

    length: int
    """Maximum tokens per text, including its prompt."""
    tokens: int
    """Writing stops at this many tokens in all, not counting each text's start tokens."""
    batch: int
    """How many prompts are continued at a time."""
    sampling: dict[str, Any]
    """Sampling settings, as `read_sampling` returns them."""
    end_tokens: list[int]
    start_tokens: int = 0
    """How many tokens the tokenizer puts at the start of every text."""
    seed: int = 0


def read_sampling(source: Source) -> dict[str, Any]:
    """The sampling settings that a model's makers recommend. Where they give none, or 0, the
    model's bare predictions are sampled."""
    recommended = read_json(source.folder / _SETTINGS)
    return {name: recommended.get(name) or bare for name, bare in _BARE_SAMPLING.items()}


def hash_settings(source: Source) -> str:
    """The hash of the makers' whole generation config. Penalties and end tokens, too, decide what
    is written."""
    settings = read_json(source.folder / _SETTINGS)
    settings.pop("transformers_version", None)
    return digest(settings)


def find_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text. Makers name them in one of three places."""
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
    """Continue prompts `[P]` into texts `[T]`, until there are enough tokens or no more prompts.

    Each text is a prompt and its continuation, up to an end token or to `settings.length` tokens in
    all. Raises `RotationZooError` if the model cannot generate.
    """
    texts = checkpoint.read_text() if checkpoint is not None else []
    # Test the model itself: no list says which models' layers mistake padding for text.
    batch = _usable_batch(model, prompts[0], settings.batch)
    while len(texts) < len(prompts):
        written = sum(map(len, texts)) - settings.start_tokens * len(texts)
        if written >= settings.tokens:
            break
        progress("writing", Tokens(written), Tokens(settings.tokens))
        next_prompts = prompts[len(texts) : len(texts) + batch]
        # The seed depends only on how many texts there are, so a resumed run writes what an
        # uninterrupted one would.
        seed = _SEED_STRIDE * settings.seed + len(texts)
        texts += _continue_prompts(model, next_prompts, settings, seed)
        if checkpoint is not None:
            checkpoint.save_text(texts)
    progress("writing", Tokens(settings.tokens), Tokens(settings.tokens))
    return texts


def _usable_batch(model: PreTrainedModel, prompt: torch.Tensor, batch: int) -> int:
    """The batch size to generate with: `batch`, or 1 if the model mistakes padding for text.

    Layers with a running state may do so, when a shorter prompt is padded to the length of a longer
    one. The test compares the predictions made token by token with those of one pass over the same
    text. Raises `RotationZooError` if they differ even for a single prompt, or are not finite.
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
    """Whether the two tokens after the first prompt are predicted as in one pass over its text.

    The other prompts are continued with it in the same batch.
    """
    options = PLAIN | {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    generated = model.generate(  # type: ignore[operator]
        **_pad_left(model, prompts), **options, output_logits=True, max_new_tokens=2
    )
    step_by_step = torch.stack([logits[0].float().cpu() for logits in generated.logits])
    # The second token is left out: only its prediction is compared.
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
    """Pad the prompts on the left to one batch, since the model continues their ends."""
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
    # Leave the caller's random state as it was.
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        generated: torch.Tensor = model.generate(  # type: ignore[operator]
            **_pad_left(model, prompts),
            **PLAIN,
            **settings.sampling,
            max_new_tokens=settings.length - width,
            eos_token_id=settings.end_tokens or None,
        )
    # A text that ends early is padded to the length of the longest in its batch.
    end_tokens = torch.tensor(settings.end_tokens, dtype=torch.long)
    texts = []
    for prompt, continuation in zip(prompts, generated[:, width:].cpu(), strict=True):
        ends = torch.isin(continuation, end_tokens).nonzero()
        if len(ends):
            continuation = continuation[: int(ends[0]) + 1]
        texts.append(torch.cat([prompt, continuation]))
    return texts
