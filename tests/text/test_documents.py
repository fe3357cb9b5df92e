"""Files and data sets of text: what is read, and what is refused."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.models import TEXTS, small, write_jsonl

from rotationzoo.errors import RotationZooError
from rotationzoo.text import documents
from rotationzoo.text.rows import read_corpus


def test_text_and_parquet_and_another_column(jsonl, tokenizer, tmp_path):
    plain = tmp_path / "text.txt"
    plain.write_text("\n".join(TEXTS))
    assert len(read_corpus(small(plain), tokenizer).rows) == 8
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"body": TEXTS}), table)
    assert len(read_corpus(small(table, column="body"), tokenizer).rows) == 8
    with pytest.raises(
        RotationZooError, match="no column text or messages or conversations: it has body"
    ):
        read_corpus(small(table), tokenizer)


def test_bad_sources(tmp_path, tokenizer):
    def mistake(name, content):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(RotationZooError) as caught:
            read_corpus(small(path), tokenizer)
        return str(caught.value)

    assert "holds no text" in mistake("empty.jsonl", "")
    assert "holds no text" in mistake("blank.jsonl", '{"text": ""}\n')
    assert "holds no text" in mistake("empty.txt", "")
    assert re.fullmatch(
        r"short.txt has \d+ tokens, too few for a row of 64", mistake("short.txt", "a few words")
    )
    assert "no file that ends with .jsonl, .txt, .parquet" in mistake("table.csv", "text\nhello\n")
    (tmp_path / "texts").mkdir()
    with pytest.raises(RotationZooError, match="texts is no file that ends with"):
        read_corpus(small(tmp_path / "texts"), tokenizer)
    assert "line 2 of" in mistake("broken.jsonl", '{"text": "fine"}\n{"text": \n')
    assert "no column text or messages or conversations: it has body" in mistake(
        "other.jsonl", '{"body": "x"}\n'
    )
    with pytest.raises(RotationZooError, match="there is no file"):
        read_corpus(small(tmp_path / "absent.jsonl"), tokenizer)
    with pytest.raises(RotationZooError, match="nobody/nothing could not be read"):
        read_corpus(small("nobody/nothing"), tokenizer)


@pytest.mark.parametrize("content", [5, ["a"], {"a": 1}, [{"from": "human"}]])
def test_content_that_is_no_text(content, tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "odd.jsonl", [{"text": content}])
    shown = content[0] if isinstance(content, list) else content
    says = re.escape(f"has {shown!r} where a text or a list of chat messages should be")
    with pytest.raises(RotationZooError, match=says):
        read_corpus(small(path), tokenizer)


def test_text_that_is_not_utf_8(tmp_path, tokenizer):
    (tmp_path / "latin.txt").write_bytes("na\xefve".encode("latin-1"))
    with pytest.raises(RotationZooError, match="no UTF-8 text"):
        read_corpus(small(tmp_path / "latin.txt"), tokenizer)


def test_only_as_much_is_read_as_may_be_used(tmp_path, tokenizer, monkeypatch):
    """A text file comes in pieces, also where it has no line ends, and a long one is not read to
    its end."""
    path = tmp_path / "long.txt"
    path.write_text("word " * 400_000)
    pieces = [record["text"] for record in documents._pieces(path)]
    assert "".join(pieces) == path.read_text()
    assert max(map(len, pieces)) <= 2 * documents._PIECE
    read_so_far = []

    def count_pieces(path):
        for piece in pieces:
            read_so_far.append(piece)
            yield {"text": piece}

    monkeypatch.setattr(documents, "_pieces", count_pieces)
    assert read_corpus(small(path), tokenizer).tokens == 512
    assert len(read_so_far) < len(pieces)
