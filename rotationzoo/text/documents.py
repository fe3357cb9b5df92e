"""Calibration text: a data set, a file or the bundled text, as rows of token ids with a
fingerprint."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.recipe import FILES, SELF, Data

BUNDLED = Path(__file__).parents[1] / "data" / "demo" / "calibration.jsonl"
HELD_OUT = BUNDLED.with_name("evaluation.jsonl")
_CHARACTERS_A_TOKEN = 40  # documents are mixed among about ten times the text that is used
_PIECE = 1 << 16  # characters

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
        """Batches `[B, T]` of up to `size` rows of equal length, short rows first and otherwise in
        order."""
        batches: list[list[torch.Tensor]] = []
        for row in sorted(self.rows, key=len):
            if not batches or len(batches[-1]) == size or batches[-1][0].shape != row.shape:
                batches.append([])
            batches[-1].append(row)
        return [torch.stack(batch) for batch in batches]


def read(data: Data, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """The rows that `data` describes. Raises `RotationZooError` for a missing or empty source, a
    wrong column, or too little text for one row."""
    if data.source == SELF:
        raise RotationZooError(
            "a model writes text of its own only where it is calibrated",
            hint="give a file with --data",
        )
    documents = _shuffled(_documents(data), data.seed, _CHARACTERS_A_TOKEN * data.tokens)
    return _cut((_tokenize(document, tokenizer, data) for document in documents), data, tokenizer)


def prompts(data: Data, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """What the model is to go on from, a row each: as many as would fill the rows of `data` by
    themselves, one of each `length` tokens of a text. Raises as `read`."""
    given = data.model_copy(update={"source": data.prompts, "packing": "document"})
    start, rows, left = start_tokens(tokenizer), [], data.tokens
    room, skipped = max(data.prompt_tokens, data.length // 2), 0
    try:
        for prompt in _prompts(given, tokenizer, data.prompt_tokens - len(start)):
            fits = len(start) + len(prompt) <= room
            if fits:
                rows.append(torch.tensor([*start, *prompt]))
            skipped += not fits
            left -= len(prompt)
            if left <= 0:
                break
    except RotationZooError as error:
        raise RotationZooError(
            str(error), hint=(error.hint or "").replace("--data", "--prompts")
        ) from error
    note = (
        f"{skipped} of {skipped + len(rows)} chats left out: longer than half a row"
        if skipped
        else None
    )
    if not rows:
        raise RotationZooError(
            f"{data.prompts} has no prompt that leaves room in rows of {data.length} tokens",
            hint="give shorter ones with --prompts, or longer rows with --length",
        )
    return Corpus(rows, _fingerprint(rows), note)


def _prompts(data: Data, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Iterator[list[int]]:
    """The first `tokens` of each `length` of a text, and whole chats."""
    for document in _shuffled(_documents(data), data.seed, _CHARACTERS_A_TOKEN * data.tokens):
        if isinstance(document, str):
            ids = _tokenize(document, tokenizer, data)
            yield from filter(
                None, (ids[at : at + max(tokens, 1)] for at in range(0, len(ids), data.length))
            )
        else:
            yield _tokenize(_asked(document), tokenizer, data, answer=True)


def written(
    texts: Iterable[torch.Tensor], data: Data, tokenizer: PreTrainedTokenizerBase
) -> Corpus:
    """The rows of texts `[T]` that the model wrote, which begin as requests do. Raises as
    `read`."""
    start = len(start_tokens(tokenizer))
    return _cut((text[start:].tolist() for text in texts), data, tokenizer)


def _asked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat up to where it is the model's turn for the last time."""
    asked = [number for number, message in enumerate(messages, 1) if message["role"] != "assistant"]
    return messages[: asked[-1]] if asked else messages


def _cut(
    token_lists: Iterable[list[int]], data: Data, tokenizer: PreTrainedTokenizerBase
) -> Corpus:
    make = _document_rows if data.packing == "document" else _packed_rows
    rows = make(filter(None, token_lists), data, tokenizer)
    found = sum(row.numel() for row in rows)
    source = "what the model made of the prompts" if data.source == SELF else data.label
    if not rows:
        raise RotationZooError(
            f"{source} is too short for a row of {data.length} tokens",
            hint="give more text with --data, or shorter rows with --length",
        )
    note = None
    if found < data.tokens:
        whole = data.packing != "document" and len(rows) == len(data.row_lengths)
        reason = f"whole rows of {data.length}" if whole else f"all of {source}"
        note = f"{found:,} tokens instead of {data.tokens:,}: {reason}"
    return Corpus(rows, _fingerprint(rows), note)


def _fingerprint(rows: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little") + row.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _packed_rows(
    documents: Iterable[list[int]], data: Data, tokenizer: PreTrainedTokenizerBase
) -> list[torch.Tensor]:
    """Rows of the lengths that `data` asks for, documents one after the other. Where the tokenizer
    starts every text with some tokens, each row starts with them too, as each request does."""
    start = start_tokens(tokenizer)
    stream = (token for document in documents for token in document)
    rows: list[torch.Tensor] = []
    for length in data.row_lengths:
        row = start + list(islice(stream, length - len(start)))
        if len(row) < length:
            break
        rows.append(torch.tensor(row))
    return rows


def _document_rows(
    documents: Iterable[list[int]], data: Data, tokenizer: PreTrainedTokenizerBase
) -> list[torch.Tensor]:
    """One row a document, its first `length` tokens, until `tokens` are reached."""
    start, left = start_tokens(tokenizer), data.tokens
    rows: list[torch.Tensor] = []
    for document in documents:
        row = [*start, *document][: min(data.length, left)]
        if len(row) > 1:  # a single token attends to nothing
            rows.append(torch.tensor(row))
            left -= len(row)
        if left < 2:
            break
    return rows


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before every text."""
    plain, full = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    return full[: full.index(plain[0])] if plain and plain[0] in full else []


def _tokenize(
    document: Document, tokenizer: PreTrainedTokenizerBase, data: Data, answer: bool = False
) -> list[int]:
    """The ids of one document, closed by the end token as in training; a chat template closes its
    own turns, and with `answer` opens the model's."""
    end = []
    if isinstance(document, str):
        end = (
            [tokenizer.eos_token_id]
            if data.packing != "document" and isinstance(tokenizer.eos_token_id, int)
            else []
        )
    else:
        if tokenizer.chat_template is None:
            raise RotationZooError(
                f"{data.source} holds chat messages and the model's tokenizer has no chat template",
                hint="name a column of plain text with --column",
            )
        with _reading(f"a chat of {data.source} does not fit the model's chat template"):
            document = str(
                tokenizer.apply_chat_template(
                    document, tokenize=False, add_generation_prompt=answer
                )
            )
        # Rows get their start tokens when they are cut.
        document = document.removeprefix(str(tokenizer.decode(start_tokens(tokenizer))))
    # Rows are cut to length later, so the tokenizer's warning about long texts does not apply.
    with _reading(f"a text of {data.source} cannot be tokenized"):
        return [*tokenizer(document, add_special_tokens=False, verbose=False).input_ids, *end]


def _documents(data: Data) -> Iterator[Document]:
    path = BUNDLED if data.source == "bundled" else Path(data.source).expanduser()
    suffix = path.suffix.lower()
    if suffix in FILES and not path.is_file():
        raise RotationZooError(
            f"there is no file {data.source}", hint="check the path given with --data"
        )
    if path.exists() and suffix not in FILES:
        raise RotationZooError(
            f"{data.source} is neither of {', '.join(FILES)}",
            hint="rename it, or give a data set id of the hub with --data",
        )
    read_file = {".txt": _pieces, ".jsonl": _json_lines}.get(suffix)
    records = read_file(path) if read_file else _data_set(data, path)
    empty = True
    for record in records:
        document = record.get(_column(record, data))
        if not document:
            continue
        if not _is_document(document):
            raise RotationZooError(
                f"{data.source} has a {type(document).__name__} where a text or a list of chat messages should be",
                hint="name another column with --column; messages have a role and a content",
            )
        empty = False
        yield document
    if empty:
        raise RotationZooError(
            f"{data.source} holds no text", hint="give another source with --data, or bundled"
        )


def _is_document(value: Any) -> bool:
    if isinstance(value, list):
        return all(
            isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value
        )
    return isinstance(value, str)


def _column(record: dict[str, Any], data: Data) -> str:
    wanted = [data.column] if data.column else ["text", "messages"]
    for column in wanted:
        if column in record:
            return column
    raise RotationZooError(
        f"{data.source} has no column {' or '.join(wanted)}: it has {', '.join(map(str, record)) or 'none'}",
        hint="name the column of the text or of the chat messages with --column",
    )


def _pieces(path: Path) -> Iterator[dict[str, Any]]:
    """A text file in pieces of some 64 KB, cut at line ends, so that no file is too large."""
    with _reading(f"{path} is not readable as UTF-8 text"), path.open(encoding="utf-8") as file:
        while lines := file.readlines(_PIECE):
            for start in range(
                0, len(text := "".join(lines)), 2 * _PIECE
            ):  # more than one only where lines are endless
                yield {"text": text[start : start + 2 * _PIECE]}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RotationZooError(
                    f"line {number} of {path} is not JSON", hint="a line is one document"
                ) from error
            yield record if isinstance(record, dict) else {"text": record}


def _data_set(data: Data, path: Path) -> Iterator[dict[str, Any]]:
    """Streamed, so that nothing is written to disk and little more is fetched than is used."""
    import datasets

    with _reading(f"the data set {data.source} could not be read"):
        if path.suffix.lower() == ".parquet":
            yield from datasets.load_dataset(
                "parquet", data_files=str(path), split="train", streaming=True
            )
        else:
            yield from datasets.load_dataset(
                data.source, data.subset, split=data.split, streaming=True
            )


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Whatever a reader, a template or a hub client raises, as one sentence."""
    try:
        yield
    except RotationZooError:
        raise
    except Exception as error:
        raise RotationZooError(
            f"{what}: {first_sentence(error)}",
            hint="check --data, --subset, --split and --column, and the network; or use a local file, or bundled",
        ) from error


def _shuffled(documents: Iterator[Document], seed: int, budget: int) -> Iterator[Document]:
    """The documents in an order fixed by the seed, mixed within blocks of `budget` characters: more
    than will be used, and never so much that a large data set is read to its end."""
    generator = random.Random(seed)
    block: list[Document] = []
    size = 0
    for document in documents:
        block.append(document)
        size += (
            len(document)
            if isinstance(document, str)
            else sum(len(str(m["content"])) for m in document)
        )
        if size >= budget:
            generator.shuffle(block)
            yield from block
            block, size = [], 0
    generator.shuffle(block)
    yield from block
