"""Token rows of calibration text, packed to equal length, with a fingerprint; and rows with images
or audio, one per document, from the processor of a vision or omni model."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.documents import BadRow, Sample, Tally, read_documents, reading_errors
from rotationzoo.words import counted


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The start tokens of texts, from the tokenizer or, if it adds none, its chat template."""
    own, template = _own_start(tokenizer), tokenizer.chat_template
    if own or not template:
        return own
    return list(_start_of_chats(tokenizer, str(template)))


def start_note(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A note if the start tokens are from the chat template."""
    start = start_tokens(tokenizer)
    if not start or _own_start(tokenizer):
        return None
    return f"texts start with {tokenizer.decode(start)}, which only the chat template writes"


def _own_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    plain, full = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    return full[: full.index(plain[0])] if plain and plain[0] in full else []


@lru_cache(maxsize=4)
def _start_of_chats(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[int, ...]:
    """The special tokens before the first message of a chat. `template` is a key of the cache."""
    chat = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    text, start = "", list[int]()
    with suppress(RotationZooError):
        for messages in (chat, chat[1:]):  # some templates refuse a system message
            with suppress(ValueError):
                text = text or ChatTemplate(tokenizer).render(messages)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    marks = {bos := tokenizer.bos_token_id, *tokenizer.added_tokens_decoder}
    for token, following in pairwise(ids):
        once = ids.count(token) <= 1 + (token == bos)  # Llama 2 starts each question with it
        # A special token before text starts a message.
        if not (once and token in marks and (token == bos or following in marks)):
            break
        start.append(token)
    return tuple(start)


def tokenize(sample: Sample, template: ChatTemplate, data: Data) -> list[int]:
    """The ids of one document, without start tokens. A text ends with the end token, as in
    training. Raises `RotationZooError` for a chat without a template, and `BadRow` if it is
    refused."""
    tokenizer, end = template.tokenizer, []
    if isinstance(sample.document, str):
        text = sample.document
        if isinstance(tokenizer.eos_token_id, int):
            end = [tokenizer.eos_token_id]
    elif tokenizer.chat_template is None:
        problem = f"{data.source} holds chat messages, and the tokenizer has no chat template"
        raise RotationZooError(problem, "name a column of plain text with --column")
    else:
        cannot = f"a chat of {data.source} does not fit the model's chat template"
        tools = sample.tools or None
        with reading_errors(cannot, BadRow):
            text = template.render(sample.document, tools=tools, add_generation_prompt=False)
        text = text.removeprefix(str(tokenizer.decode(start_tokens(tokenizer))))
    with reading_errors(f"a text of {data.source} cannot be tokenized", BadRow):
        # Not verbose, because long texts are cut into rows later.
        return [*tokenizer(text, add_special_tokens=False, verbose=False).input_ids, *end]


@dataclass(frozen=True)
class MediaRow:
    """A row of token ids `[1, T]`, with the processor's inputs for images and audio."""

    ids: torch.Tensor
    is_media: torch.Tensor  # the positions `[T]` of image or audio features
    inputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Corpus:
    """Token rows `[T]` int64, and the sha256 of their ids and row boundaries."""

    rows: list[torch.Tensor]
    fingerprint: str
    note: str | None  # a note for the user, such as that there are too few tokens
    media: Sequence[MediaRow] = ()  # the same rows with their images and audio, if any
    date: str | None = None  # the day that a chat template wrote as today's

    @property
    def tokens(self) -> int:
        return sum(row.numel() for row in self.rows)

    def batches(self, size: int) -> list[torch.Tensor]:
        """Batches `[B, T]` of up to `size` rows of equal length."""
        return list(torch.stack(self.rows).split(size))


def read_corpus(data: Data, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """The rows of `data`. Raises `RotationZooError` for a bad source or too little text."""
    template, tally = ChatTemplate(tokenizer, data.date), Tally()
    documents = _tokenized(data, template, tally)
    rows = list(_packed_rows(documents, data, start_tokens(tokenizer)))
    left_out = tally.check()
    if not rows:
        found = counted(tally.tokens, "token")
        problem = f"{data.label} has {found}, too few for a row of {data.length:,}"
        raise RotationZooError(problem, "give more text with --data, or shorter rows with --length")
    notes = shortfall(rows, data), left_out, template.note, start_note(tokenizer)
    note = "; ".join(filter(None, notes)) or None
    return Corpus(rows, fingerprint(rows), note, date=template.written_day)


def _tokenized(data: Data, template: ChatTemplate, tally: Tally) -> Iterator[list[int]]:
    """The ids of the documents that are not empty."""
    for sample in read_documents(data, tally):
        with tally.leaving_out(sample.number):
            if ids := tokenize(sample, template, data):
                tally.tokens += len(ids)
                yield ids


def fingerprint(rows: list[torch.Tensor]) -> str:
    """sha256 of the ids of rows `[T]`, each preceded by its length."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little") + row.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def shortfall(rows: list[torch.Tensor], data: Data) -> str | None:
    """A note with the reason if there are fewer tokens than requested."""
    tokens = sum(row.numel() for row in rows)
    if tokens >= data.tokens:
        return None
    all_rows = len(rows) == data.rows and not data.media
    reason = f"whole rows of {data.length}" if all_rows else f"all of {data.label}"
    return f"{counted(tokens, 'token')} instead of {data.tokens:,}: {reason}"


def _packed_rows(
    documents: Iterable[list[int]], data: Data, start: list[int]
) -> Iterator[torch.Tensor]:
    """Join the documents and cut them into rows that start with the start tokens, like requests."""
    stream = (token for document in documents for token in document)
    for _ in range(data.rows):
        row = start + list(islice(stream, data.length - len(start)))
        if len(row) < data.length:
            break
        yield torch.tensor(row)


# ---- images and audio


_Messages = list[dict[str, Any]]
_PARTS = {"image": "vision_config", "audio": "audio_config"}


def media_tokens(config: PretrainedConfig, data: Data, name: str) -> list[int]:
    """The ids of tokens that stand for media. Raises `RotationZooError` if the model has none."""
    ids: list[int] = []
    for kind, column in data.media.items():
        named = (getattr(config, f"{kind}_token_{ending}", None) for ending in ("id", "index"))
        known = [token for token in named if isinstance(token, int)]
        if not known or getattr(config, _PARTS[kind], kind) is None:
            problem = f"{name} reads no {kind}, which the data has in column {column}"
            raise RotationZooError(problem, "leave the column out, or give a model that reads it")
        ids += known
    return ids


def read_media_corpus(data: Data, processor: Any, config: PretrainedConfig) -> Corpus:
    """The rows of `data` for the model of this processor, cut to `data.length`; documents with
    media after that are left out. Raises `RotationZooError`, also for media that cannot be read."""
    template, tally = ChatTemplate(processor, data.date), Tally()
    tokens = torch.tensor(media_tokens(config, data, "the model"))
    marks = processor.tokenizer.convert_ids_to_tokens(tokens.tolist())
    rows, left_out = list[MediaRow](), 0
    cannot = f"a document of {data.source} cannot be prepared for the model"
    for sample in read_documents(data, tally):
        with tally.leaving_out(sample.number), reading_errors(cannot, BadRow):
            messages = _place(sample)
            _check_places(messages, sample, marks, data)
            row = _cut(_prepare(messages, sample, template, data), tokens, data)
            if row is None:
                left_out += 1
            else:
                rows.append(row)
        if sum(row.ids.numel() for row in rows) >= data.tokens:
            break
    bad = tally.check()
    if not rows:
        problem = f"{data.label} has no row whose images and audio fit {data.length} tokens"
        raise RotationZooError(problem, "give longer rows with --length, or smaller images")
    ids = [row.ids[0] for row in rows]
    longer = f"{counted(left_out, 'document')} with longer images or audio left out"
    notes = shortfall(ids, data), longer if left_out else None, bad, template.note
    inputs = [value for row in rows for _, value in sorted(row.inputs.items())]
    content = [value.contiguous().flatten().view(torch.uint8) for value in inputs]
    note = "; ".join(filter(None, notes)) or None
    return Corpus(ids, fingerprint([*ids, *content]), note, rows, template.written_day)


def _place(sample: Sample) -> _Messages:
    """A chat whose parts name kinds of media, without URLs that a template could fetch."""
    if isinstance(sample.document, str):
        marks = [{"type": kind} for kind, values in sample.media.items() for _ in values]
        return [{"role": "user", "content": [*marks, {"type": "text", "text": sample.document}]}]
    messages = []
    for message in sample.document:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        bare = [{"type": part["type"], "text": part.get("text")} for part in parts]
        messages.append(message | {"content": bare})
    return messages


def _check_places(messages: _Messages, sample: Sample, marks: list[str], data: Data) -> None:
    """Raise `BadRow` unless each image or audio clip of a chat has one place."""
    parts = [part for message in messages for part in message["content"]]
    for kind in ("image", "audio", "video"):
        places, given = sum(part["type"] == kind for part in parts), len(sample.media.get(kind, []))
        if places != given:
            problem = f"a chat of {data.source} has {counted(places, 'part')} of type {kind}"
            hint = "give one part for each of the column; videos are not read"
            raise BadRow(f"{problem}, and its row has {given} to put there", hint)
    text = "".join(part.get("text") or "" for part in parts)
    if written := [mark for mark in marks if mark and mark in text]:
        problem = f"a text of {data.source} holds {written[0]}, which stands for media of the model"
        raise BadRow(problem, "remove it from the text: the chat template adds it")


def _prepare(messages: _Messages, sample: Sample, template: ChatTemplate, data: Data) -> Any:
    """The inputs of the model for a chat, by name, from the processor."""
    processor: Any = template.tokenizer
    given: dict[str, Any] = {}
    if images := sample.media.get("image"):
        from PIL import Image  # installed, because the processor needs it

        given["images"] = [[Image.open(_file(each, data)).convert("RGB") for each in images]]
    if sounds := sample.media.get("audio"):
        rate = given["sampling_rate"] = processor.feature_extractor.sampling_rate
        given["audio"] = [_read_audio(sound, rate, data) for sound in sounds]
    text = template.render(messages, tools=sample.tools or None, add_generation_prompt=False)
    start = processor.tokenizer.decode(start_tokens(processor.tokenizer))
    # Some processors add no start tokens, and others would add them twice.
    if start and text.startswith(start):
        given["add_special_tokens"] = False
    return processor(text=[text], return_tensors="pt", **given)


def _cut(made: Any, tokens: torch.Tensor, data: Data) -> MediaRow | None:
    """The first tokens of a row; None if the rest contains media `tokens`."""
    whole, length = made["input_ids"].shape, data.length
    is_media = torch.isin(made["input_ids"][0], tokens)
    if is_media[length:].any():
        return None
    inputs = {}
    for name, value in made.items():
        if isinstance(value, torch.Tensor):
            inputs[name] = value[:, :length] if value.shape == whole else value
    return MediaRow(inputs.pop("input_ids"), is_media[:length], inputs)


def _read_audio(value: Any, rate: int, data: Data) -> Any:
    """The samples `[N]` of a WAV file, float32, at a rate in Hz: the mean of its channels."""
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    own_rate, samples = wavfile.read(_file(value, data))
    if samples.dtype.kind in "iu":
        samples = samples / 2.0 ** (8 * samples.itemsize - 1) - (samples.dtype.kind == "u")
    mono = samples.reshape(len(samples), -1).mean(1).astype("float32")
    return resample_poly(mono, rate, own_rate)


def _file(value: Any, data: Data) -> io.BytesIO | Path:
    """The bytes of an image or audio clip, or its path, relative to the data file."""
    held = value if isinstance(value, dict) else {"path": value}
    path = Path(data.source).expanduser().parent
    return io.BytesIO(held["bytes"]) if held.get("bytes") else path / held["path"]
