"""Documents of calibration text: texts or chats from a file or a data set on the hub."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rotationzoo.errors import RotationZooError, as_refusal
from rotationzoo.recipe import FILES, Data
from rotationzoo.storage.files import check_utf8
from rotationzoo.text.chats import Message, read_functions, read_message
from rotationzoo.words import counted, shortened

BUNDLED = Path(__file__).parents[1] / "data" / "demo" / "calibration.jsonl"
"""The source `bundled`, the default of `calibrate`."""
HELD_OUT = BUNDLED.with_name("evaluation.jsonl")
"""The bundled text of `evaluate`. None of it is in `BUNDLED`."""

_CHARACTERS_A_TOKEN = 40  # about ten times the text that is used, to shuffle
_PIECE = 1 << 16  # characters
_BAD = 100  # reading may stop after this many bad rows
_ROWS = 64  # of a table at a time, because they may hold images

Document = str | list[Message]  # a text, or the messages of a chat
Media = dict[str, list[Any]]  # the images and audio of a document: kind -> bytes or paths
_Record = dict[str, Any]  # column -> value


class Sample(NamedTuple):
    """A document, with its row's number and media."""

    number: int
    document: Document
    media: Media
    tools: list[dict[str, Any]]  # the tools that a chat may call, as JSON schemas


class BadRow(RotationZooError):
    """A row that cannot be used. It is left out if at most 1 % are bad."""


@dataclass
class Tally:
    """The number of rows and tokens read, and row number -> error for rows left out."""

    rows: int = 0
    tokens: int = 0
    bad: dict[int, BadRow] = field(default_factory=dict)

    @contextmanager
    def leaving_out(self, number: int) -> Iterator[None]:
        """Leave the row out if the block raises `BadRow`."""
        try:
            yield
        except BadRow as error:
            self.bad[number] = error
            if len(self.bad) > _BAD:
                self.check()

    def check(self) -> str | None:
        """A note on the rows left out. Raises `RotationZooError` if they are more than 1 %."""
        if not self.bad:
            return None
        first = min(self.bad)
        share = f"{len(self.bad):,} of {counted(self.rows, 'row')}"
        if 100 * len(self.bad) > self.rows:
            words = f"{self.bad[first]} ({share} cannot be used, the first in line {first})"
            raise RotationZooError(words, self.bad[first].hint)
        return f"{share} left out, the first in line {first}"


def read_documents(data: Data, tally: Tally) -> Iterator[Sample]:
    """The documents of a source, shuffled. Raises `RotationZooError` if it is not readable."""
    return _shuffled(_samples(data, tally), data.seed, _CHARACTERS_A_TOKEN * data.tokens)


def _samples(data: Data, tally: Tally) -> Iterator[Sample]:
    empty = True
    for number, record in enumerate(_records(data), 1):
        if not record:  # a blank line
            continue
        tally.rows += 1
        with tally.leaving_out(number):
            sample = _read_sample(number, record, data)
            if sample.document:  # data sets have empty rows
                empty = False
                yield sample
    if empty:
        tally.check()
        hint = "give another source with --data, or bundled"
        raise RotationZooError(f"{data.source} holds no text", hint)


def _read_sample(number: int, record: _Record | bytes, data: Data) -> Sample:
    if isinstance(record, bytes):
        with reading_errors(f"the JSON in line {number} of {data.source}", BadRow):
            record = json.loads(record)
        record = record if isinstance(record, dict) else {"text": record}
    wanted = [data.column] if data.column else ["text", "messages", "conversations"]
    document, tools = record[_column(record, wanted, data)] or "", []
    if not isinstance(document, str):
        try:
            document = _read_chat(document, record)
            tools = read_functions(record.get("tools"))
        except ValueError as error:
            problem = f"{data.source} has {shortened(repr(error.args[0]))} where a text or a list"
            hint = "name another column with --column; messages have a role and a content"
            raise BadRow(f"{problem} of chat messages should be", hint) from error
    media = {}
    for kind, column in data.media.items():
        value = record[_column(record, [column], data)] or []
        media[kind] = value if isinstance(value, list) else [value]
    return Sample(number, document, media, tools)


def _read_chat(given: Any, record: _Record) -> list[Message]:
    if not isinstance(given, list):
        raise ValueError(given)
    messages = [read_message(message) for message in given]
    system = record.get("system")  # ShareGPT has it next to the chat
    if system and isinstance(system, str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _records(data: Data) -> Iterator[_Record | bytes]:
    path = BUNDLED if data.source == "bundled" else Path(data.source).expanduser()
    check_utf8(path)
    suffix = path.suffix.lower()
    if suffix not in FILES:
        if path.exists():
            problem = f"{data.source} is not a file that ends with {', '.join(FILES)}"
            hint = "give such a file, or a data set id of the hub, with --data"
            raise RotationZooError(problem, hint)
        return _data_set(data)
    if not path.is_file():
        raise RotationZooError(f"there is no file {data.source}", hint="check the path of --data")
    if suffix == ".parquet":
        return _table_rows(data, path)
    return _pieces(path) if suffix == ".txt" else _json_lines(path)


def _column(record: _Record, wanted: list[str], data: Data) -> str:
    for column in wanted:
        if column in record:
            return column
    columns = ", ".join(map(str, record)) or "none"
    hint = "name the column of the text or of the chat messages with --column (or --images)"
    raise BadRow(f"{data.source} has no column {' or '.join(wanted)}: it has {columns}", hint)


def _pieces(path: Path) -> Iterator[_Record]:
    """A text file of any size, without its BOM, in pieces of about 64 KB, cut at line ends."""
    with reading_errors(str(path)), path.open(encoding="utf-8-sig") as file:
        while lines := file.readlines(_PIECE):
            text = "".join(lines)
            if "\0" in text:  # UTF-16 without a BOM
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "NUL")
            for start in range(0, len(text), 2 * _PIECE):
                yield {"text": text[start : start + 2 * _PIECE]}


def _json_lines(path: Path) -> Iterator[bytes]:
    """One document per line: the JSON of a record or of its text."""
    with path.open("rb") as file:
        yield from map(bytes.strip, file)


def _data_set(data: Data) -> Iterator[_Record]:
    """A data set on the hub, streamed, so that only the used part is fetched."""
    import datasets  # takes a second

    with reading_errors(f"the data set {data.source} could not be read"):
        source = datasets.load_dataset(data.source, data.subset, split=data.split, streaming=True)
        yield from source.decode(False) if source.features else source  # images stay bytes


def _table_rows(data: Data, path: Path) -> Iterator[_Record]:
    """Rows of a parquet file; `datasets` would read the path as a pattern, and write a cache."""
    import pyarrow.parquet

    with reading_errors(f"the data set {data.source} could not be read"), path.open("rb") as file:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(_ROWS):
            yield from batch.to_pylist()


@contextmanager
def reading_errors(what: str, kind: type[RotationZooError] = RotationZooError) -> Iterator[None]:
    """Turn any error of a reader, template or hub client into one sentence after `what`."""
    options = "--data, --subset, --split and --column"
    hint = f"check {options}, and the network; or use a local file, or bundled"
    with as_refusal(what, hint, kind):
        try:
            yield
        except UnicodeDecodeError as error:
            hint = "unpack it, or convert it with: iconv -f ENCODING -t utf-8"
            raise kind(f"{what} is not UTF-8 text", hint) from error


def _shuffled(documents: Iterator[Sample], seed: int, budget: int) -> Iterator[Sample]:
    """The documents, shuffled by the seed within blocks of `budget` characters."""
    generator = random.Random(seed)
    block, size = list[Sample](), 0
    for document in documents:
        block.append(document)
        size += _characters(document)
        if size >= budget:
            generator.shuffle(block)
            yield from block
            block, size = [], 0
    generator.shuffle(block)
    yield from block


def _characters(sample: Sample) -> int:
    held, document = len(str(sample.media or "")), sample.document
    if isinstance(document, str):
        return held + len(document)
    return held + sum(len(str(message["content"])) for message in document)
