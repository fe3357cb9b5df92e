"""Rows of text with images or audio, made by the processor of a vision or omni model.

A row is one document. The processor's chat template says where images and audio stand: before the
text, or where a chat has a part `{"type": "image"}` or `{"type": "audio"}`.
"""

import hashlib
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rotationzoo.errors import RotationZooError
from rotationzoo.model.media import MediaRow, media_tokens
from rotationzoo.recipe import FILES, Data
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.documents import MediaDocument, read_media_documents, reading_errors
from rotationzoo.text.rows import Corpus, fingerprint, shortfall, start_tokens
from rotationzoo.words import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig, ProcessorMixin


def read_media_corpus(
    data: Data, processor: "ProcessorMixin", config: "PretrainedConfig"
) -> Corpus:
    """The rows that `data` describes, for the model of this processor and config.

    A row is cut to `data.length` behind its last image or sound; documents whose images are longer
    are left out. Raises `RotationZooError` for what `read_corpus` does, and for images and audio
    that are missing or cannot be read.
    """
    if processor.chat_template is None:
        raise RotationZooError(
            "the model's processor has no chat template, which says where images and audio stand",
            hint="add chat_template.jinja to the model's folder",
        )
    template = ChatTemplate(processor)
    tokens = torch.tensor([id for kind in data.media for id in media_tokens(config, kind)])
    rows: list[MediaRow] = []
    left, left_out = data.tokens, 0
    for document in read_media_documents(data):
        row = _cut(_process(document, template, tokens, data), data.length)
        if row is None:
            left_out += 1
            continue
        row = _cut(row, left)
        if row is None:
            break
        if row.entering(data.positions).any():
            rows.append(row)
            left -= row.ids.numel()
    if not rows:
        raise RotationZooError(
            f"{data.label} has no row whose images and audio fit {data.length} tokens",
            hint="give longer rows with --length, or smaller images",
        )
    ids = [row.ids[0] for row in rows]
    notes = [shortfall(ids, data)]
    if left_out:
        notes.append(f"{counted(left_out, 'document')} with longer images or audio left out")
    note = "; ".join(filter(None, notes)) or None
    return Corpus(ids, _fingerprint(rows), note, rows)


def _process(
    document: MediaDocument, template: ChatTemplate, tokens: torch.Tensor, data: Data
) -> MediaRow:
    """A document as the processor prepares it."""
    processor: Any = template.tokenizer
    with reading_errors(f"a document of {data.source} does not fit the model's processor"):
        given: dict[str, Any] = {}
        if images := document.media.get("image"):
            given["images"] = [[_read_image(image, data) for image in images]]
        if sounds := document.media.get("audio"):
            rate = processor.feature_extractor.sampling_rate
            given["audio"] = [_read_audio(sound, rate, data) for sound in sounds]
            given["sampling_rate"] = rate
        text = template.render(_messages(document), add_generation_prompt=False)
        start = str(processor.tokenizer.decode(start_tokens(processor.tokenizer)))
        made = processor(text=[text.removeprefix(start)], return_tensors="pt", **given)
    inputs = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
    ids = inputs.pop("input_ids")
    inputs.pop("attention_mask", None)  # nothing is padded
    return MediaRow(ids, torch.isin(ids[0], tokens), inputs)


def _messages(document: MediaDocument) -> list[dict[str, Any]]:
    """The chat of a document, with a part for each image and sound. Parts hold nothing that a
    template could fetch."""
    media = [{"type": kind} for kind, values in document.media.items() for _ in values]
    chat = document.document
    if isinstance(chat, str):
        return [{"role": "user", "content": [*media, {"type": "text", "text": chat}]}]
    messages = []
    for message in chat:
        parts = _parts(message["content"])
        messages.append({"role": message["role"], "content": parts})
    placed = any(part["type"] != "text" for message in messages for part in message["content"])
    users = [message for message in messages if message["role"] == "user"]
    if users and not placed:
        users[0]["content"][:0] = media
    return messages


def _parts(content: Any) -> list[dict[str, Any]]:
    """The parts of a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for part in content:
        kept = {key: part[key] for key in ("type", "text") if part.get(key) is not None}
        parts.append(kept)
    return parts


def _cut(row: MediaRow, length: int) -> MediaRow | None:
    """The first `length` tokens of a row, or None if an image or a sound would be cut, or if fewer
    than two are left."""
    tokens = row.ids.shape[1]
    if length < 2 or row.is_media[length:].any():
        return None
    inputs = {}
    for name, tensor in row.inputs.items():
        is_aligned = tensor.shape[:2] == (1, tokens) and tensor.ndim == 2
        inputs[name] = tensor[:, :length] if is_aligned else tensor
    return MediaRow(row.ids[:, :length], row.is_media[:length], inputs)


def _read_image(value: Any, data: Data) -> Any:
    """An image of a document, in RGB."""
    try:
        from PIL import Image
    except ImportError as error:
        raise RotationZooError(
            "images are read with Pillow, which is not installed",
            hint="install it: pip install 'rotationzoo[media]'",
        ) from error
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    with Image.open(_file(value, data)) as image:
        return image.convert("RGB")


def _read_audio(value: Any, rate: int, data: Data) -> Any:
    """The samples `[N]` of a WAV file of a document, float32 at a rate in Hz, of all channels
    together."""
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    own_rate, samples = wavfile.read(_file(value, data))
    wave = torch.from_numpy(samples.copy())
    if not wave.is_floating_point():
        full = torch.iinfo(wave.dtype)
        wave = (wave.double() - (full.max + full.min + 1) // 2) / ((full.max - full.min + 1) // 2)
    if wave.ndim == 2:
        wave = wave.mean(1)
    common = math.gcd(rate, own_rate)
    return resample_poly(wave.float().numpy(), rate // common, own_rate // common)


def _file(value: Any, data: Data) -> io.BytesIO | Path:
    """The file of an image or a sound: its bytes, or its path from the folder of the data file."""
    if isinstance(value, dict) and value.get("bytes"):
        return io.BytesIO(value["bytes"])
    named = value.get("path") if isinstance(value, dict) else value
    source = Path(data.source).expanduser()
    if not isinstance(named, str) or source.suffix.lower() not in FILES:
        raise RotationZooError(
            f"{data.source} holds a {type(value).__name__} where an image or a sound should be",
            hint="name another column with --images or --audio",
        )
    path = source.parent / named
    if not path.is_file():
        raise RotationZooError(
            f"there is no file {named}, which {data.source} names",
            hint="give paths from the folder of that file",
        )
    return path


def _fingerprint(rows: list[MediaRow]) -> str:
    """sha256 of the rows' ids and of everything else that the model reads."""
    digest = hashlib.sha256(fingerprint([row.ids[0] for row in rows]).encode())
    for row in rows:
        for name, tensor in sorted(row.inputs.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
