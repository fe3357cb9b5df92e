"""Token rows of calibration text, with a fingerprint, and their batches.

Documents are packed into rows of equal length, or each document gets its own row. A document is
tokenized as a model would see it in training or in a request.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.documents import Document, read_documents, reading_errors
from rotationzoo.words import counted


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before every text."""
    # With special tokens, a letter comes after the start tokens; without, it comes alone.
    plain, full = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    return full[: full.index(plain[0])] if plain and plain[0] in full else []


def tokenize(document: Document, template: ChatTemplate, data: Data) -> list[int]:
    """The ids of one document, without start tokens: rows get those when they are cut.

    A text ends with the end token, as in training, unless each row is a single document. A chat
    template closes its own turns. Raises `RotationZooError` for a chat where the tokenizer has no
    template, and for text that it cannot read.
    """
    tokenizer = template.tokenizer
    if isinstance(document, str):
        text, end = document, _end_tokens(tokenizer, data)
    else:
        text, end = _chat_text(document, template, data), []
    with reading_errors(f"a text of {data.source} cannot be tokenized"):
        # Rows are cut to length later, so the tokenizer's warning about long texts would mislead.
        return [*tokenizer(text, add_special_tokens=False, verbose=False).input_ids, *end]


def _end_tokens(tokenizer: PreTrainedTokenizerBase, data: Data) -> list[int]:
    end = tokenizer.eos_token_id
    return [end] if data.packing != "document" and isinstance(end, int) else []


def _chat_text(messages: list[dict[str, Any]], template: ChatTemplate, data: Data) -> str:
    """A chat in the form of the template, without the start tokens that many templates begin
    with."""
    tokenizer = template.tokenizer
    if tokenizer.chat_template is None:
        raise RotationZooError(
            f"{data.source} holds chat messages and the model's tokenizer has no chat template",
            hint="name a column of plain text with --column",
        )
    with reading_errors(f"a chat of {data.source} does not fit the model's chat template"):
        text = template.render(messages, add_generation_prompt=False)
    return text.removeprefix(str(tokenizer.decode(start_tokens(tokenizer))))


@dataclass(frozen=True)
class MediaRow:
    """A row of token ids `[1, T]`, with what a model's processor makes of images and audio."""

    ids: torch.Tensor
    is_media: torch.Tensor
    """Which positions `[T]` hold features of images or audio."""
    counts: torch.Tensor
    """Which positions `[T]` enter the statistics."""
    inputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Corpus:
    """Token rows `[T]` int64, and the sha256 of their exact ids and row boundaries."""

    rows: list[torch.Tensor]
    fingerprint: str
    note: str | None
    """Something the user should know, such as that there are fewer tokens than asked for."""
    media: Sequence[MediaRow] = ()
    """The same rows with their images and audio, where they have any."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows together."""
        return sum(row.numel() for row in self.rows)

    def batches(self, size: int) -> list[torch.Tensor]:
        """Batches `[B, T]` of up to `size` rows of equal length. Shorter rows come first; rows of
        one length keep their order."""
        batches: list[list[torch.Tensor]] = []
        # Sorted, because a batch needs rows of one length.
        for row in sorted(self.rows, key=len):
            if not batches or len(batches[-1]) == size or batches[-1][0].shape != row.shape:
                batches.append([])
            batches[-1].append(row)
        return [torch.stack(batch) for batch in batches]


def read_corpus(data: Data, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """The rows that `data` describes. Raises `RotationZooError` for a missing or empty source, a
    wrong column, or too little text for one row."""
    template = ChatTemplate(tokenizer)
    documents = (tokenize(document, template, data) for document, _ in read_documents(data))
    start = start_tokens(tokenizer)
    not_empty = filter(None, documents)
    if data.packing == "document":
        rows = _document_rows(not_empty, data, start)
    else:
        rows = _packed_rows(not_empty, data, start)
    if not rows:
        raise RotationZooError(
            f"{data.label} is too short for a row of {data.length} tokens",
            hint="give more text with --data, or shorter rows with --length",
        )
    return Corpus(rows, fingerprint(rows), shortfall(rows, data))


def fingerprint(rows: list[torch.Tensor]) -> str:
    """sha256 of the ids of rows `[T]`, each preceded by its length."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little") + row.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def shortfall(rows: list[torch.Tensor], data: Data) -> str | None:
    """The note for the user, with the reason, where there are fewer tokens than asked for."""
    tokens = sum(row.numel() for row in rows)
    if tokens >= data.tokens:
        return None
    all_rows = data.packing != "document" and len(rows) == len(data.row_lengths) and not data.media
    reason = f"whole rows of {data.length}" if all_rows else f"all of {data.label}"
    return f"{counted(tokens, 'token')} instead of {data.tokens:,}: {reason}"


def _packed_rows(
    documents: Iterable[list[int]], data: Data, start: list[int]
) -> list[torch.Tensor]:
    """Join the documents and cut them into rows of the lengths that `data` asks for. Where the
    tokenizer starts every text with certain tokens, each row starts with them, too, as each request
    does."""
    stream = (token for document in documents for token in document)
    rows: list[torch.Tensor] = []
    for length in data.row_lengths:
        row = start + list(islice(stream, length - len(start)))
        if len(row) < length:
            break
        rows.append(torch.tensor(row))
    return rows


def _document_rows(
    documents: Iterable[list[int]], data: Data, start: list[int]
) -> list[torch.Tensor]:
    """One row per document, holding its first `length` tokens, until there are `tokens` in all."""
    left = data.tokens
    rows: list[torch.Tensor] = []
    for document in documents:
        row = [*start, *document][: min(data.length, left)]
        if len(row) > 1:  # a single token attends to nothing
            rows.append(torch.tensor(row))
            left -= len(row)
        if left < 2:
            break
    return rows
