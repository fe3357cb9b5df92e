"""The generation job: a model continues a prompt through a 2-bit cache. The report has the text,
the size of the cache, and where the exact model's text differs."""

import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from rotationzoo.artifact.reductions import describe_losses
from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.rotated import RotatedCache, build_settings
from rotationzoo.codec.formats import BUDGETED
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.errors import ModelUnavailable, RotationZooError, UsageError, as_unavailable
from rotationzoo.geometry import check_group_size, head_dims
from rotationzoo.model import compatibility, loading
from rotationzoo.model.capture import cache_argument
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.placement import is_out_of_memory, memory_limits, place_weights
from rotationzoo.model.prediction import check_finite
from rotationzoo.model.quantized import check_loadable
from rotationzoo.model.source import fetch, fetch_weights, find
from rotationzoo.progress import Progress, Tokens, silent
from rotationzoo.recall.prompts import common_length
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.rope import longer_rows_hint, position_count, scaling_of
from rotationzoo.settings import GenerationSettings, Write
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.rows import start_note, start_tokens

# Settings that a model's own generation config cannot override: one text per prompt, token by token
# to its end. Others, such as a repetition penalty, are the model's.
_PLAIN: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "use_cache": True,
    "return_dict_in_generate": False,
    "max_time": None,
    "stop_strings": None,
    "prompt_lookup_num_tokens": None,
    "cache_implementation": None,
}
_CONTEXT = 8  # tokens of the prompt that the first new ones are decoded with
_INCOMPLETE = "\ufffd"  # the decoded first bytes of a character

END, LENGTH, INTERRUPTED = "end", "length", "interrupted"
"""Why a text ended: at the model's end token, at the limit, or with Ctrl-C."""


def check_settings(job: GenerationSettings) -> None:
    """Raise `UsageError` for settings that are out of range or exclude each other."""
    numbers = {"--max-new-tokens": job.new_tokens, "--prefill-chunk": job.prefill_chunk}
    for option, number in numbers.items():
        if number < 1:
            raise UsageError(f"{option} must be at least 1, not {number}", hint=f"{option} 256")
    if not job.prompt.strip():
        raise UsageError("the prompt is empty", hint="give some text to continue")
    memory_limits(job.device_map, job.max_memory)


def _open_rotations(job: GenerationSettings) -> Artifact | None:
    """The artifact. Raises `RotationZooError` if it or needed transform coding is missing."""
    artifact = job.rotations
    if isinstance(artifact, str | Path):
        artifact = Artifact.open(Path(artifact).expanduser())
    if job.format == BUDGETED:
        if artifact is None:
            problem = f"the format {BUDGETED} needs rotations with transform coding"
            raise RotationZooError(problem, "add: --rotations ROTATIONS, or give another --format")
        RotatedCodec(artifact.rotations, rounding="transform")  # for its error
    return artifact


class TextStream(BaseStreamer):
    """A streamer for transformers' `generate` that writes the text of each token at once.

    Many tokenizers decode the space before a word only after other words, so tokens are decoded
    together with those before them, and written once their last character is complete.
    transformers' `TextStreamer` waits for a space, and loses spaces at the beginning of a line.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, write: Write):
        """`prompt`: the ids `[T]` before the text."""
        self.tokenizer, self._write = tokenizer, write
        self.ids: list[int] = []
        """The tokens so far, with the end token."""
        self.text = ""
        self.times: list[float] = []
        """When the model began to read, and when each token came."""
        self.stop = LENGTH
        self._context: list[int] = prompt[-_CONTEXT:].tolist()
        self._pending: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, which comes first, or the next token."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            ids = value.flatten().tolist()
            self.ids += ids
            self._pending += ids
            self._decode(last=False)

    def end(self) -> None:
        """Write the rest, even if its last character is incomplete."""
        self._decode(last=True)

    @property
    def figures(self) -> dict[str, Any]:
        """The text, why it ended, and its tokens per second after the first one."""
        steps = len(self.times) - 2
        speed = steps / (self.times[-1] - self.times[1]) if steps > 0 else None
        tokens = {"tokens": len(self.ids), "tokens_per_second": speed}
        return {"text": self.text, **tokens, "stop": self.stop}

    def _decode(self, last: bool) -> None:
        rows = self._context, [*self._context, *self._pending]
        before, text = (str(self.tokenizer.decode(row, skip_special_tokens=True)) for row in rows)
        if text.endswith(_INCOMPLETE) and not last:
            return
        new = text[len(before) :]
        if new:
            self.text += new
            self._context, self._pending = (self._context + self._pending)[-_CONTEXT:], []
            self._write(new)


def generate(
    job: GenerationSettings,
    progress: Progress = silent,
    write: Write | None = None,
    note: Write = lambda text: None,
) -> dict[str, Any]:
    """Continue a prompt through a 2-bit cache, and return the report that `generate --json` prints.

    `write` gets the text piece by piece; without it, `progress` counts the tokens. `note` gets
    notes for the reader. Raises `UsageError` for settings that exclude each other or a prompt that
    is too long for the model, and `RotationZooError` for rotations that do not fit the model,
    before any weights are fetched if the config is enough to tell.
    """
    check_settings(job)
    device, artifact = job.torch_device, _open_rotations(job)
    progress("looking at the model", 0, 0)
    source = find(job.model, job.revision)
    artifacts = [artifact] if artifact else []
    scaling = compatibility.settle_rope_scaling(job.rope_scaling, artifacts, source)
    config = loading.load_config(source, scaling)
    check_loadable(config, source.name, device)
    geometry = geometry_on_meta(loading.on_meta(config, source.name))
    if geometry is not None:
        compatibility.check_artifacts(job.model, artifacts, geometry)
        check_group_size(job.group_size, head_dims(geometry))
    fetch(source, weights=False)
    tokenizer = loading.load_tokenizer(source)
    options = job.as_engine(any(each.rotations.has_budget for each in artifacts))
    sink, recent = options.windows(artifact.recipe if artifact else Recipe())
    if not job.chat and (said := start_note(tokenizer)):
        note(said)
    prompt = encode_prompt(job, tokenizer, config)
    length = len(prompt)
    loading.check_ids([prompt], config, job.model)
    fetch_weights(source, progress)
    compatibility.check_weights(artifacts, source, job.anyway)
    notes = []
    if job.engine is not None:
        notes.append(describe_losses(job.engine, artifacts))
    notes += filter(None, [compatibility.other_weights_note(each, source) for each in artifacts])
    notes += compatibility.rope_notes(artifacts, scaling)
    for text in notes:
        note(text)
    with place_weights(job.device_map, job.max_memory) as placement:
        progress("loading the model", 0, 0)
        model = loading.load(source, config, device, job.torch_dtype, placement)

        def continued(stage: str, write: Write | None, cache: DynamicCache | None) -> TextStream:
            pieces, total = count(1), Tokens(job.new_tokens)
            # A piece of text is usually a token.
            tell = write or (lambda text: progress(stage, Tokens(next(pieces)), total))
            stream = TextStream(tokenizer, prompt, tell)
            progress("reading the prompt", 0, 0)
            continue_prompt(model, prompt, job, stream, cache)
            return stream

        # From settings, because `notes` already mentions other weights.
        cache = RotatedCache(build_settings(artifact, model, job), model)
        written = continued("writing", write, cache)
        sizes = {"cache_bytes": cache.bytes_held, "bf16_cache_bytes": cache.bytes_in_bf16}
        del cache  # the exact model's own is larger
        compared: dict[str, Any] = {}
        if job.compare and written.stop != INTERRUPTED:
            exact = continued("writing with the exact model", None, None)
            compared = {f"exact_{name}": figure for name, figure in exact.figures.items()}
            compared["parted_at"] = find_parting(written, exact)
    seconds = written.times[1] - written.times[0] if written.ids else None
    speed = length / seconds if seconds else None
    return {
        "model": source.label,
        "revision": source.revision,
        "rotations": str(artifact.folder) if artifact else None,
        "notes": notes,
        "rope_scaling": scaling_of(config),
        "format": options.format,
        "sink": sink,
        "recent": recent,
        **sizes,
        "prompt_tokens": length,
        "prompt_seconds": seconds,
        "prompt_tokens_per_second": speed,
        **written.figures,
        **compared,
    }


def encode_prompt(
    job: GenerationSettings, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> torch.Tensor:
    """The ids `[T]` of the prompt after the tokenizer's start tokens, or of a chat with the prompt
    as the user's message. Raises `UsageError` for a chat without a template and for more tokens,
    with the new ones, than the model has positions, and `RotationZooError` for a refused text."""
    text, start, positions = job.prompt, start_tokens(tokenizer), position_count(config)
    if job.chat and tokenizer.chat_template is None:
        hint = "leave out --chat, and the model continues the prompt as a text"
        raise UsageError(f"the tokenizer of {job.model} has no chat template", hint)
    if job.chat:
        messages = [{"role": "user", "content": text}]
        refused = f"the chat template of {job.model} refuses the prompt"
        with as_unavailable(refused, hint="leave out --chat"):
            text = ChatTemplate(tokenizer).render(messages, add_generation_prompt=True)
        start = []
    refused = f"the prompt cannot be tokenized for {job.model}"
    with as_unavailable(refused, hint="give another prompt"):
        # Not verbose, because the error below replaces the tokenizer's warning.
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not ids:
        hint = "give another prompt"
        raise RotationZooError(f"the tokenizer of {job.model} gives no tokens for the prompt", hint)
    length = len(start) + len(ids)
    needed = length + job.new_tokens
    if positions is not None and needed > positions:
        hint = f"give a prompt of fewer than {positions:,} tokens"
        if positions > length:
            hint = f"add: --max-new-tokens {positions - length}, or give a shorter prompt"
        raise UsageError(
            f"a prompt of {length:,} tokens and {job.new_tokens:,} new ones exceed the "
            f"{positions:,} positions of {job.model}",
            hint=longer_rows_hint(config, needed, hint),
        )
    return torch.tensor([*start, *ids])


def continue_prompt(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    job: GenerationSettings,
    stream: TextStream,
    cache: DynamicCache | None,
) -> None:
    """Continue a prompt of ids `[T]` greedily, through a cache or the model's own. The text goes to
    `stream`, until its limit or Ctrl-C. Raises `RotationZooError` if the model fails or its logits
    are not finite, and `OSError` if the reader of the text, or a disk with weights, fails."""
    # Models name their end tokens in one of three places.
    text_config = model.config.get_text_config(decoder=True)
    places = model.generation_config, text_config, stream.tokenizer
    named = [getattr(place, "eos_token_id", None) for place in places]
    ends: int | list[int] = next((each for each in named if each is not None), [])
    end_tokens = ends if isinstance(ends, list) else [ends]
    ids = prompt[None].to(loading.input_device(model))
    untyped: Any = model
    options = dict(_PLAIN)
    if cache is not None:
        options |= cache_argument(model, cache)
    if ids.shape[1] > job.prefill_chunk:
        options["prefill_chunk_size"] = job.prefill_chunk

    def check_scores(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_finite(model, scores, partial(model, input_ids=ids, use_cache=False))
        return scores

    try:
        with as_unavailable(f"{job.model} fails when it runs"):
            untyped.generate(
                inputs=ids,
                attention_mask=torch.ones_like(ids),
                streamer=stream,
                logits_processor=[check_scores],
                max_new_tokens=job.new_tokens,
                eos_token_id=end_tokens or None,
                pad_token_id=0,  # not used, but without one the library warns
                **options,
            )
    except KeyboardInterrupt:
        stream.stop = INTERRUPTED
        stream.end()
    except ModelUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, OSError):  # such as a closed pipe
            raise cause from None
        if is_out_of_memory(cause):
            smaller = max(1, job.prefill_chunk // 4)
            raise RotationZooError(
                "the prompt, the cache and what the model computes do not fit the device's memory",
                hint=f"add: --prefill-chunk {smaller}, or give a shorter prompt",
            ) from error
        raise
    if stream.ids and stream.ids[-1] in end_tokens:
        stream.stop = END


def find_parting(one: TextStream, other: TextStream) -> dict[str, int] | None:
    """How many characters and tokens of two continuations agree before the first difference, or
    None if there is none. A text that was interrupted is compared up to its end."""
    token = common_length(one.ids, other.ids)
    cut_short = [len(each.ids) for each in (one, other) if each.stop == INTERRUPTED]
    if token in (*cut_short, max(len(one.ids), len(other.ids))):
        return None
    return {"character": common_length(one.text, other.text), "token": token}
