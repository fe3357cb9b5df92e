"""Documents of calibration text: texts or chats from the bundled file, a local file or a data set
on the hub.

A new bundled text is a file in `data/demo` and a case of `_records`; `evaluation.judged_text` says
which bundled text takes its place when a model is judged.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rotationzoo.errors import RotationZooError, first_sentence
from rotationzoo.recipe import FILES, Data
from rotationzoo.words import shortened

BUNDLED = Path(__file__).parents[1] / "data" / "demo" / "calibration.jsonl"
"""The source `bundled`, which calibration reads by default."""
HELD_OUT = BUNDLED.with_name("evaluation.jsonl")
"""The bundled text that `evaluate` reads. None of it is in `BUNDLED`."""

_CHARACTERS_A_TOKEN = 40  # shuffles documents among about ten times the text that is used
_PIECE = 1 << 16  # characters

Document = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""
Media = dict[str, list[Any]]
"""The images and audio of a document: kind -> bytes or paths, as the source holds them."""
_Pair = tuple[Document, Media]
_Record = dict[str, Any]  # column -> value


def read_documents(data: Data) -> Iterator[_Pair]:
    """The documents of `data.source` with their images and audio, in an order that its seed fixes.
    Raises `RotationZooError` for a source that is missing, empty or not readable, and for a wrong
    column."""
    return _shuffled(_documents(data), data.seed, _CHARACTERS_A_TOKEN * data.tokens)


def _documents(data: Data) -> Iterator[_Pair]:
    """The documents in the order of the source."""
    empty = True
    for record in _records(data):
        wanted = [data.column] if data.column else ["text", "messages"]
        document = record.get(_column(record, wanted, data))
        if not document:  # data sets have empty rows
            continue
        if not _is_document(document):
            raise RotationZooError(
                f"{data.source} has {shortened(repr(document))} where a text or a list of chat "
                "messages should be",
                hint="name another column with --column; messages have a role and a content",
            )
        empty = False
        media = {}
        for kind, column in data.media.items():
            value = record[_column(record, [column], data)] or []
            media[kind] = value if isinstance(value, list) else [value]
        yield document, media
    if empty:
        raise RotationZooError(
            f"{data.source} holds no text", hint="give another source with --data, or bundled"
        )


def _records(data: Data) -> Iterator[_Record]:
    path = BUNDLED if data.source == "bundled" else Path(data.source).expanduser()
    suffix = path.suffix.lower()
    # Otherwise a mistyped file would be looked for as a data set on the hub.
    if suffix in FILES and not path.is_file():
        raise RotationZooError(f"there is no file {data.source}", hint="check the path of --data")
    if path.exists() and suffix not in FILES:
        raise RotationZooError(
            f"{data.source} is no file that ends with {', '.join(FILES)}",
            hint="give such a file, or a data set id of the hub, with --data",
        )
    if suffix == ".txt":
        return _pieces(path)
    return _json_lines(path) if suffix == ".jsonl" else _data_set(data, path)


def _is_document(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_message(element) for element in value)
    return isinstance(value, str)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _column(record: _Record, wanted: list[str], data: Data) -> str:
    """The first of the wanted columns that a record has."""
    for column in wanted:
        if column in record:
            return column
    columns = ", ".join(map(str, record)) or "none"
    raise RotationZooError(
        f"{data.source} has no column {' or '.join(wanted)}: it has {columns}",
        hint="name the column of the text or of the chat messages with --column (or --images)",
    )


def _pieces(path: Path) -> Iterator[_Record]:
    """A text file in pieces of about 64 KB, cut at line ends, so that a file of any size can be
    read."""
    with reading_errors(str(path)), path.open(encoding="utf-8") as file:
        while lines := file.readlines(_PIECE):
            text = "".join(lines)
            # This is one piece, unless a line is very long.
            for start in range(0, len(text), 2 * _PIECE):
                yield {"text": text[start : start + 2 * _PIECE]}


def _json_lines(path: Path) -> Iterator[_Record]:
    """One document per line: a record, or just its text."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise _not_utf8(f"line {number} of {path}") from error
            except ValueError as error:
                raise RotationZooError(
                    f"line {number} of {path} is not JSON", hint="a line is one document"
                ) from error
            yield record if isinstance(record, dict) else {"text": record}


def _data_set(data: Data, path: Path) -> Iterator[_Record]:
    """A data set on the hub, or a parquet file. It is streamed, so that nothing is written to disk
    and little more is fetched than is used."""
    import datasets  # takes a second to import, and most jobs do not need it

    with reading_errors(f"the data set {data.source} could not be read"):
        where: dict[str, Any] = {"path": data.source, "name": data.subset, "split": data.split}
        if path.suffix.lower() == ".parquet":
            where = {"path": "parquet", "data_files": str(path), "split": "train"}
        source = datasets.load_dataset(**where, streaming=True)
        yield from source.decode(False) if source.features else source  # images stay bytes


@contextmanager
def reading_errors(what: str) -> Iterator[None]:
    """Turn any error of a reader, a chat template or a hub client into one sentence that begins
    with `what`."""
    try:
        yield
    except RotationZooError:
        raise
    except UnicodeDecodeError as error:
        raise _not_utf8(what) from error
    except Exception as error:
        raise RotationZooError(
            f"{what}: {first_sentence(error)}",
            hint="check --data, --subset, --split and --column, and the network; or use a local "
            "file, or bundled",
        ) from error


def _not_utf8(what: str) -> RotationZooError:
    return RotationZooError(
        f"{what} is no UTF-8 text", hint="convert it, for example with: iconv -f latin1 -t utf-8"
    )


def _shuffled(documents: Iterator[_Pair], seed: int, budget: int) -> Iterator[_Pair]:
    """The documents in an order that the seed fixes. They are shuffled within blocks of `budget`
    characters: more than will be used, but not so much that a large data set is read to its end."""
    generator = random.Random(seed)
    block: list[_Pair] = []
    size = 0
    for document in documents:
        block.append(document)
        size += _characters(document)
        if size >= budget:
            generator.shuffle(block)
            yield from block
            block, size = [], 0
    generator.shuffle(block)
    yield from block


def _characters(pair: _Pair) -> int:
    document, media = pair
    held = len(str(media)) if media else 0
    if isinstance(document, str):
        return held + len(document)
    return held + sum(len(str(message["content"])) for message in document)
