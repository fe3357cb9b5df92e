"""Calibration text: a data set, a file or the bundled text, as rows of token ids with a fingerprint."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data

BUNDLED = Path(__file__).parent / "data" / "demo" / "calibration.jsonl"
_SHUFFLE_BUFFER = 10_000  # documents held in memory at a time
_FILES = (".jsonl", ".txt", ".parquet")

Document = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""


@dataclass(frozen=True)
class Corpus:
    """Token rows `[T]` int64, and the sha256 of the exact ids with their row boundaries."""

    rows: list[torch.Tensor]
    fingerprint: str
    note: str | None
    """What the user should know, such as fewer tokens than asked for."""

    @property
    def tokens(self) -> int:
        return sum(row.numel() for row in self.rows)

    def batches(self, size: int) -> list[torch.Tensor]:
        """Batches `[B, T]` of up to `size` consecutive rows of equal length, in order."""
        batches: list[list[torch.Tensor]] = []
        for row in self.rows:
            if not batches or len(batches[-1]) == size or batches[-1][0].shape != row.shape:
                batches.append([])
            batches[-1].append(row)
        return [torch.stack(batch) for batch in batches]


def read(data: Data, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """The rows that `data` describes. Raises `RotationZooError` for a missing or empty source, a wrong column, or too
    little text for one row."""
    documents = _shuffled(_documents(data), data.seed)
    token_lists = (_tokenize(document, tokenizer, data) for document in documents)
    make = _packed_rows if data.packing == "packed" else _document_rows
    rows = make(filter(None, token_lists), data, tokenizer)
    found = sum(row.numel() for row in rows)
    if not rows:
        raise RotationZooError(
            f"{data.source} is too short for a row of {data.length} tokens",
            hint="give more text with --data, or shorter rows with --length",
        )
    note = None
    if found < data.tokens:
        reason = "the rest is no whole row" if data.tokens - found < data.length else f"all that {data.source} gives"
        note = f"{found:,} tokens instead of {data.tokens:,}: {reason}"
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little") + row.numpy().astype("<i8").tobytes())
    return Corpus(rows, digest.hexdigest(), note)


def _packed_rows(documents: Iterable[list[int]], data: Data, tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """Rows of exactly `length`: documents joined by the end token. Where the tokenizer starts every text with a token,
    each row starts with it too, as each request does."""
    start = _start_tokens(tokenizer)
    end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    body = data.length - len(start)
    wanted = data.tokens // data.length
    if wanted == 0:
        raise RotationZooError(
            f"{data.tokens} tokens are less than one row of {data.length}",
            hint=f"ask for at least --tokens {data.length}, or for shorter rows with --length",
        )
    stream = (token for document in documents for token in [*document, *end])
    rows: list[torch.Tensor] = []
    while len(rows) < wanted and len(chunk := list(islice(stream, body))) == body:
        rows.append(torch.tensor(start + chunk))
    return rows


def _document_rows(documents: Iterable[list[int]], data: Data, tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """One row a document, its first `length` tokens, until `tokens` are reached."""
    start, left = _start_tokens(tokenizer), data.tokens
    rows: list[torch.Tensor] = []
    for document in documents:
        row = [*start, *document][: min(data.length, left)]
        if len(row) > 1:  # a single token attends to nothing
            rows.append(torch.tensor(row))
            left -= len(row)
        if left < 2:
            break
    return rows


def _start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    first = tokenizer("a").input_ids[:1]
    return first if first == [tokenizer.bos_token_id] else []


def _tokenize(document: Document, tokenizer: PreTrainedTokenizerBase, data: Data) -> list[int]:
    if not isinstance(document, str):
        if tokenizer.chat_template is None:
            raise RotationZooError(
                f"{data.source} holds chat messages and the model's tokenizer has no chat template",
                hint="name a column of plain text with --column",
            )
        document = str(tokenizer.apply_chat_template(document, tokenize=False))
        bos = tokenizer.bos_token if isinstance(tokenizer.bos_token, str) else ""
        document = document.removeprefix(bos)  # rows get their start token when they are cut
    # Rows are cut to length later, so the tokenizer's warning about long texts does not apply.
    return tokenizer(document, add_special_tokens=False, verbose=False).input_ids


def _documents(data: Data) -> Iterator[Document]:
    path = BUNDLED if data.source == "bundled" else Path(data.source).expanduser()
    if path.suffix in _FILES and not path.is_file():
        raise RotationZooError(f"there is no file {data.source}", hint="check the path given with --data")
    if path.suffix == ".txt":
        records: Iterable[dict[str, Any]] = [{"text": _text(path)}]
    elif path.suffix == ".jsonl":
        records = _json_lines(path)
    else:
        records = _data_set(data, path)
    empty = True
    for record in records:
        document = record.get(_column(record, data))
        if document:
            empty = False
            yield document
    if empty:
        raise RotationZooError(f"{data.source} holds no text", hint="give another source with --data, or bundled")


def _column(record: dict[str, Any], data: Data) -> str:
    wanted = [data.column] if data.column else ["text", "messages"]
    for column in wanted:
        if column in record:
            return column
    raise RotationZooError(
        f"{data.source} has no column {' or '.join(wanted)}: it has {', '.join(map(str, record)) or 'none'}",
        hint="name the column of the text or of the chat messages with --column",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RotationZooError(f"{path} is not readable as UTF-8 text: {error}") from error


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RotationZooError(f"line {number} of {path} is not JSON", hint="a line is one document") from error
            yield record if isinstance(record, dict) else {"text": record}


def _data_set(data: Data, path: Path) -> Iterator[dict[str, Any]]:
    """Streamed, so that nothing is written to disk and no more is fetched than is read."""
    import datasets

    try:
        if path.suffix == ".parquet":
            return iter(datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True))
        return iter(datasets.load_dataset(data.source, data.subset, split=data.split, streaming=True))
    except Exception as error:  # the library raises what its readers and the hub client raise
        raise RotationZooError(
            f"the data set {data.source} could not be opened: {str(error).splitlines()[0].rstrip('.')}",
            hint="check --data, --subset and --split and the network, or use a local file or bundled",
        ) from error


def _shuffled(documents: Iterator[Document], seed: int) -> Iterator[Document]:
    """The documents in an order fixed by the seed, mixed within blocks that fit in memory."""
    generator = random.Random(seed)
    while block := list(islice(documents, _SHUFFLE_BUFFER)):
        generator.shuffle(block)
        yield from block
