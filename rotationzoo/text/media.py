"""Rows of text with images or audio, made by the processor of a vision or omni model: one row per
document, with media where the processor's chat template puts them."""

import io
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.documents import BadRow, Sample, Tally, read_documents, reading_errors
from rotationzoo.text.rows import Corpus, MediaRow, fingerprint, shortfall, start_tokens
from rotationzoo.words import counted

_Messages = list[dict[str, Any]]
_PARTS = {"image": "vision_config", "audio": "audio_config"}


def media_tokens(config: PretrainedConfig, data: Data, name: str) -> list[int]:
    """The ids of the tokens that a model replaces by features of media. Raises `RotationZooError`
    if it does not read the data's media."""
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
    """The rows that `data` describes, for the model of this processor and config. Rows are cut to
    `data.length`, and documents with media behind that are left out. Raises `RotationZooError` as
    `read_corpus`, and for media that cannot be read."""
    template, tally = ChatTemplate(processor, data.date), Tally()
    tokens = torch.tensor(media_tokens(config, data, "the model"))
    marks = processor.tokenizer.convert_ids_to_tokens(tokens.tolist())
    rows: list[MediaRow] = []
    left_out = 0
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
    """A chat in parts that name kinds of media, without anything that a template could fetch."""
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
    """Raise `BadRow` unless each image or sound of a chat has one place. Some processors would make
    a row with tokens that stand for nothing."""
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
        raise BadRow(problem, "take it out of the text: the chat template puts it where it belongs")


def _prepare(messages: _Messages, sample: Sample, template: ChatTemplate, data: Data) -> Any:
    """A chat as the processor prepares it for the model, by the names of its inputs."""
    processor: Any = template.tokenizer
    given: dict[str, Any] = {}
    if images := sample.media.get("image"):
        from PIL import Image  # the processor could not be loaded without it

        given["images"] = [[Image.open(_file(each, data)).convert("RGB") for each in images]]
    if sounds := sample.media.get("audio"):
        rate = given["sampling_rate"] = processor.feature_extractor.sampling_rate
        given["audio"] = [_read_audio(sound, rate, data) for sound in sounds]
    text = template.render(messages, tools=sample.tools or None, add_generation_prompt=False)
    start = processor.tokenizer.decode(start_tokens(processor.tokenizer))
    # Some processors add no start tokens; others would add them twice.
    if start and text.startswith(start):
        given["add_special_tokens"] = False
    return processor(text=[text], return_tensors="pt", **given)


def _cut(made: Any, tokens: torch.Tensor, data: Data) -> MediaRow | None:
    """The first tokens of a row; None if that would cut the media that `tokens` stand for."""
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
    """The samples `[N]` of a WAV file, float32 at a rate in Hz, as the mean of its channels."""
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    own_rate, samples = wavfile.read(_file(value, data))
    if samples.dtype.kind in "iu":
        samples = samples / 2.0 ** (8 * samples.itemsize - 1) - (samples.dtype.kind == "u")
    mono = samples.reshape(len(samples), -1).mean(1).astype("float32")
    return resample_poly(mono, rate, own_rate)


def _file(value: Any, data: Data) -> io.BytesIO | Path:
    """The bytes of an image or a sound, or its path, relative to the data file."""
    held = value if isinstance(value, dict) else {"path": value}
    path = Path(data.source).expanduser().parent
    return io.BytesIO(held["bytes"]) if held.get("bytes") else path / held["path"]
