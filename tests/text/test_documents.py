import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from support.models import DATA

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data
from rotationzoo.text import documents
from rotationzoo.text.documents import read

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n" * 5 for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DATA / "model")


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def small(source, **changes):
    return Data(**{"source": str(source), "tokens": 512, "length": 64, **changes})


def test_packed_rows_are_of_equal_length_and_hold_the_documents_in_order(jsonl, tokenizer):
    found = read(small(jsonl), tokenizer)
    assert [row.numel() for row in found.rows] == [64] * 8
    assert found.note is None
    text = tokenizer.decode(torch.cat(found.rows), skip_special_tokens=False)
    documents = text.split("<|end|>")
    assert all(document in TEXTS for document in documents[:-1])
    assert TEXTS[TEXTS.index(documents[0]) :][:2] != documents[:2], "shuffled"


def test_mixed_rows_are_the_same_text_in_rows_of_two_lengths(jsonl, tokenizer):
    packed, mixed = (
        read(small(jsonl, length=63, packing=packing), tokenizer) for packing in ("packed", "mixed")
    )
    assert (
        [row.numel() for row in mixed.rows]
        == [63, 31, 32] * 4
        == small(jsonl, length=63, packing="mixed").row_lengths
    )
    assert torch.equal(torch.cat(mixed.rows), torch.cat(packed.rows))
    assert mixed.note == packed.note == "504 tokens instead of 512: whole rows of 63"
    assert [batch.shape for batch in mixed.batches(8)] == [(4, 31), (4, 32), (4, 63)]


def test_mixed_rows_each_begin_as_a_request_does(jsonl, tokenizer, monkeypatch):
    monkeypatch.setattr(documents, "start_tokens", lambda tokenizer: [7])
    assert [(row[0].item(), row.numel()) for row in read(small(jsonl, packing="mixed"), tokenizer).rows[:3]] == [
        (7, 64), (7, 32), (7, 32),
    ]  # fmt: skip


def test_the_same_seed_gives_the_same_ids(jsonl, tokenizer):
    one, two, other = (read(small(jsonl, seed=seed), tokenizer) for seed in (0, 0, 1))
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_the_fingerprint_covers_the_row_boundaries(jsonl, tokenizer):
    assert (
        read(small(jsonl), tokenizer).fingerprint
        != read(small(jsonl, length=128), tokenizer).fingerprint
    )


def test_one_document_a_row(jsonl, tokenizer):
    found = read(small(jsonl, packing="document", length=48, tokens=2000), tokenizer)
    texts = [tokenizer.decode(row) for row in found.rows]
    assert all(any(document.startswith(text) for document in TEXTS) for text in texts)
    assert max(row.numel() for row in found.rows) <= 48
    assert found.tokens <= 2000
    assert sum(batch.numel() for batch in found.batches(4)) == found.tokens


def test_text_and_parquet_and_another_column(jsonl, tokenizer, tmp_path):
    plain = tmp_path / "text.txt"
    plain.write_text("\n".join(TEXTS))
    assert len(read(small(plain), tokenizer).rows) == 8
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"body": TEXTS}), table)
    assert len(read(small(table, column="body"), tokenizer).rows) == 8
    with pytest.raises(RotationZooError, match="no column text or messages: it has body"):
        read(small(table), tokenizer)


def test_messages_go_through_the_chat_template(tmp_path, tokenizer):
    path = tmp_path / "chats.jsonl"
    chats = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    with pytest.raises(RotationZooError, match="no chat template"):
        read(small(path), tokenizer)
    chatty = transformers.AutoTokenizer.from_pretrained(DATA / "model")
    chatty.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    assert "[user] def function" in tokenizer.decode(torch.cat(read(small(path), chatty).rows))


def test_rows_start_as_requests_do(jsonl):
    """Where the tokenizer begins every text with a token, every row begins with it."""
    starting = transformers.AutoTokenizer.from_pretrained(DATA / "model")
    starting.bos_token = "<|end|>"
    from tokenizers.processors import TemplateProcessing

    starting._tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    found = read(small(jsonl), starting)
    assert all(row[0] == 0 and row[1] != 0 for row in found.rows)


@pytest.mark.parametrize("packing", ["packed", "document"])
def test_fewer_tokens_than_asked_for_is_said(jsonl, tokenizer, packing):
    found = read(small(jsonl, tokens=10**6, packing=packing), tokenizer)
    assert f"{found.tokens:,} tokens instead of 1,000,000" in found.note


def test_bad_sources(tmp_path, tokenizer):
    def mistake(name, content):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(RotationZooError) as caught:
            read(small(path), tokenizer)
        return str(caught.value)

    assert "holds no text" in mistake("empty.jsonl", "")
    assert "holds no text" in mistake("blank.jsonl", '{"text": ""}\n')
    assert "holds no text" in mistake("empty.txt", "")
    assert "too short for a row of 64" in mistake("short.txt", "a few words")
    assert "is neither of .jsonl, .txt, .parquet" in mistake("table.csv", "text\nhello\n")
    assert "line 2 of" in mistake("broken.jsonl", '{"text": "fine"}\n{"text": \n')
    assert "no column text or messages: it has body" in mistake("other.jsonl", '{"body": "x"}\n')
    with pytest.raises(RotationZooError, match="there is no file"):
        read(small(tmp_path / "absent.jsonl"), tokenizer)
    with pytest.raises(RotationZooError, match="nobody/nothing could not be read"):
        read(small("nobody/nothing"), tokenizer)


@pytest.mark.parametrize("content", [5, ["a", "b"], {"a": 1}, [{"from": "human", "value": "hi"}]])
def test_content_that_is_no_text(content, tmp_path, tokenizer):
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"text": content}) + "\n")
    with pytest.raises(RotationZooError, match="where a text or a list of chat messages should be"):
        read(small(path), tokenizer)


def test_text_that_cannot_be_read_or_tokenized(tmp_path, tokenizer):
    (tmp_path / "latin.txt").write_bytes("na\xefve".encode("latin-1"))
    with pytest.raises(RotationZooError, match="not readable as UTF-8"):
        read(small(tmp_path / "latin.txt"), tokenizer)
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(RotationZooError, match="cannot be tokenized"):
        read(small(tmp_path / "half.jsonl"), tokenizer)
    strict = transformers.AutoTokenizer.from_pretrained(DATA / "model")
    strict.chat_template = "{{ raise_exception('no system role') }}"
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "system", "content": "x"}]}) + "\n"
    )
    with pytest.raises(
        RotationZooError, match="does not fit the model's chat template: no system role"
    ):
        read(small(tmp_path / "chat.jsonl"), strict)


def test_only_as_much_is_read_as_may_be_used(tmp_path, tokenizer, monkeypatch):
    """A text file comes in pieces, also where it has no line ends, and a long one is not read to
    its end."""
    path = tmp_path / "long.txt"
    path.write_text("word " * 400_000)
    pieces = [record["text"] for record in documents._pieces(path)]
    assert "".join(pieces) == path.read_text()
    assert max(map(len, pieces)) <= 2 * documents._PIECE
    read_so_far = []
    monkeypatch.setattr(
        documents, "_pieces", lambda path: (read_so_far.append(p) or {"text": p} for p in pieces)
    )
    assert read(small(path), tokenizer).tokens == 512
    assert len(read_so_far) < len(pieces)


def test_a_start_of_several_tokens_is_kept_whole(jsonl):
    from tokenizers.processors import TemplateProcessing

    starting = transformers.AutoTokenizer.from_pretrained(DATA / "model")
    special = [("!", 1), ("<|end|>", 0)]
    starting._tokenizer.post_processor = TemplateProcessing(
        single="! <|end|> $A", special_tokens=special
    )
    assert all(row[:2].tolist() == [1, 0] for row in read(small(jsonl), starting).rows)


def test_batches_hold_rows_of_equal_length(jsonl, tokenizer):
    found = read(small(jsonl), tokenizer)
    assert [tuple(batch.shape) for batch in found.batches(3)] == [(3, 64), (3, 64), (2, 64)]
    assert torch.equal(torch.cat(found.batches(3)), torch.stack(found.rows))
