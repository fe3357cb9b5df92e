"""Files and data sets of text, packed into token rows, and their fingerprints."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.models import TEXTS, small, tokenizer_that_starts_with, write_jsonl

from rotationzoo.errors import RotationZooError
from rotationzoo.text.rows import read_corpus


def test_packed_rows_are_of_equal_length_and_hold_the_documents_in_order(jsonl, tokenizer):
    corpus = read_corpus(small(jsonl), tokenizer)
    assert [row.numel() for row in corpus.rows] == [64] * 8
    assert corpus.note is None
    text = tokenizer.decode(torch.cat(corpus.rows), skip_special_tokens=False)
    documents = text.split("<|end|>")
    assert all(document in TEXTS for document in documents[:-1])
    assert TEXTS[TEXTS.index(documents[0]) :][:2] != documents[:2], "shuffled"


def test_a_note_says_that_only_whole_rows_count(jsonl, tokenizer):
    corpus = read_corpus(small(jsonl, length=63), tokenizer)
    assert corpus.note == "504 tokens instead of 512: whole rows of 63"


def test_the_same_seed_gives_the_same_ids(jsonl, tokenizer):
    sources = [small(jsonl, seed=seed) for seed in (0, 0, 1)]
    first, again, another = (read_corpus(each, tokenizer).fingerprint for each in sources)
    assert first == again != another


def test_the_fingerprint_covers_the_row_boundaries(jsonl, tokenizer):
    short = read_corpus(small(jsonl), tokenizer)
    long = read_corpus(small(jsonl, length=128), tokenizer)
    assert torch.equal(torch.cat(short.rows), torch.cat(long.rows))
    assert short.fingerprint != long.fingerprint


@pytest.mark.parametrize("start", [{"<|end|>": 0}, {"!": 1, "<|end|>": 0}], ids=len)
def test_rows_start_as_requests_do(jsonl, start):
    """If the tokenizer adds start tokens to texts, each row starts with them, once."""
    starting = tokenizer_that_starts_with(f"{' '.join(start)} $A", *start.items())
    for row in read_corpus(small(jsonl), starting).rows:
        assert row[: len(start)].tolist() == list(start.values())
        assert row[len(start)] != 0


# ---- files and data sets of text: what is read, and what is refused


def test_text_and_parquet_and_another_column(jsonl, tokenizer, tmp_path, monkeypatch):
    """Tables are read without `datasets`, whose cache would have to be writable."""
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("loaded"))
    plain = tmp_path / "text.txt"
    plain.write_text("\n".join(TEXTS))
    assert len(read_corpus(small(plain), tokenizer).rows) == 8
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"body": TEXTS}), table)
    assert len(read_corpus(small(table, column="body"), tokenizer).rows) == 8
    says = "no column text or messages or conversations: it has body"
    with pytest.raises(RotationZooError, match=says):
        read_corpus(small(table), tokenizer)


@pytest.mark.parametrize(
    ("path", "other"),
    [
        ("run [v2]/text.parquet", "run v/text.parquet"),
        ("*/text.parquet", "all/text.parquet"),
        ("file::in.parquet", "in.parquet"),
        ("100%25.parquet", "100%.parquet"),
    ],
)
def test_paths_of_tables_are_not_patterns(path, other, tmp_path, tokenizer):
    for name, texts in ((path, TEXTS), (other, ["another file's words"] * 99)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": texts}), tmp_path / name)
    jsonl = write_jsonl(tmp_path / "same.jsonl", [{"text": text} for text in TEXTS])
    expected = read_corpus(small(jsonl), tokenizer).fingerprint
    assert read_corpus(small(tmp_path / path), tokenizer).fingerprint == expected


BAD = [
    ("empty.jsonl", b"", "holds no text"),
    ("blank.jsonl", b'{"text": ""}\n', "holds no text"),
    ("empty.txt", b"", "holds no text"),
    ("short.txt", b"a few words", r"^short.txt has \d+ tokens, too few for a row of 64$"),
    ("table.csv", b"text\nhello\n", "not a file that ends with .jsonl, .txt, .parquet"),
    ("texts", None, "texts is not a file that ends with"),
    ("broken.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2 of"),
    ("deep.jsonl", b"[" * 100_000, "line 1 of"),
    ("half.jsonl", b'{"text": "\\ud800"}\n', "cannot be tokenized"),
    ("chat.jsonl", b'{"messages": [{"role": "user", "content": "words"}]}\n', "no chat template"),
]


@pytest.mark.parametrize(("name", "content", "says"), BAD)
def test_bad_sources(name, content, says, tmp_path, tokenizer):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(RotationZooError, match=says):
        read_corpus(small(path), tokenizer)


def test_a_missing_data_set(tokenizer):
    with pytest.raises(RotationZooError, match="nobody/nothing could not be read"):
        read_corpus(small("nobody/nothing"), tokenizer)


@pytest.mark.parametrize("content", [5, ["a"], {"a": 1}, [{"from": "human"}]])
def test_content_that_is_not_text(content, tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "odd.jsonl", [{"text": content}])
    shown = content[0] if isinstance(content, list) else content
    says = re.escape(f"has {shown!r} where a text or a list of chat messages should be")
    with pytest.raises(RotationZooError, match=says):
        read_corpus(small(path), tokenizer)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("kind", ["latin1", "utf-16", "utf-16-le", "utf-32-be", "gzip"])
def test_files_that_are_not_utf_8_are_refused(kind, suffix, tmp_path, tokenizer):
    text, path = '"naïve"\n' * 9, tmp_path / f"text{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if kind == "gzip" else text.encode(kind))
    with pytest.raises(RotationZooError, match="is not UTF-8 text") as caught:
        read_corpus(small(path), tokenizer)
    assert caught.value.hint == "unpack it, or convert it with: iconv -f ENCODING -t utf-8"


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_bom_is_not_text(suffix, tmp_path, tokenizer):
    prints = set()
    for encoding in ("utf-8", "utf-8-sig"):
        path = tmp_path / f"{encoding}{suffix}"
        path.write_text("".join(f"{json.dumps(each)}\n" for each in TEXTS), encoding=encoding)
        prints.add(read_corpus(small(path), tokenizer).fingerprint)
    assert len(prints) == 1
