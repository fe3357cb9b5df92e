"""Documents packed into token rows, and what a fingerprint covers."""

import pytest
import torch
from support.models import TEXTS, small, tokenizer_that_starts_with

from rotationzoo.text.rows import read_corpus


def test_packed_rows_are_of_equal_length_and_hold_the_documents_in_order(jsonl, tokenizer):
    corpus = read_corpus(small(jsonl), tokenizer)
    assert [row.numel() for row in corpus.rows] == [64] * 8
    assert corpus.note is None
    text = tokenizer.decode(torch.cat(corpus.rows), skip_special_tokens=False)
    documents = text.split("<|end|>")
    assert all(document in TEXTS for document in documents[:-1])
    assert TEXTS[TEXTS.index(documents[0]) :][:2] != documents[:2], "shuffled"


def test_mixed_rows_are_the_same_text_in_rows_of_two_lengths(jsonl, tokenizer):
    mixed_data = small(jsonl, length=63, packing="mixed")
    packed = read_corpus(small(jsonl, length=63), tokenizer)
    mixed = read_corpus(mixed_data, tokenizer)
    assert [row.numel() for row in mixed.rows] == [63, 31, 32] * 4 == mixed_data.row_lengths
    assert torch.equal(torch.cat(mixed.rows), torch.cat(packed.rows))
    assert mixed.note == packed.note == "504 tokens instead of 512: whole rows of 63"
    assert [batch.shape for batch in mixed.batches(8)] == [(4, 31), (4, 32), (4, 63)]


def test_mixed_rows_each_begin_as_a_request_does(jsonl, tokenizer, monkeypatch):
    monkeypatch.setattr("rotationzoo.text.rows.start_tokens", lambda tokenizer: [7])
    rows = read_corpus(small(jsonl, packing="mixed"), tokenizer).rows[:3]
    assert [(row[0].item(), row.numel()) for row in rows] == [(7, 64), (7, 32), (7, 32)]


def test_the_same_seed_gives_the_same_ids(jsonl, tokenizer):
    first, again, another = (
        read_corpus(small(jsonl, seed=seed), tokenizer).fingerprint for seed in (0, 0, 1)
    )
    assert first == again != another


def test_the_fingerprint_covers_the_row_boundaries(jsonl, tokenizer):
    short = read_corpus(small(jsonl), tokenizer)
    long = read_corpus(small(jsonl, length=128), tokenizer)
    assert torch.equal(torch.cat(short.rows), torch.cat(long.rows))
    assert short.fingerprint != long.fingerprint


def test_one_document_a_row(jsonl, tokenizer):
    corpus = read_corpus(small(jsonl, packing="document", length=48, tokens=2000), tokenizer)
    texts = [tokenizer.decode(row) for row in corpus.rows]
    assert all(any(document.startswith(text) for document in TEXTS) for text in texts)
    assert max(row.numel() for row in corpus.rows) <= 48
    assert corpus.tokens <= 2000
    assert sum(batch.numel() for batch in corpus.batches(4)) == corpus.tokens


@pytest.mark.parametrize("start", [{"<|end|>": 0}, {"!": 1, "<|end|>": 0}], ids=len)
def test_rows_start_as_requests_do(jsonl, start):
    """Where the tokenizer begins every text with tokens, every row begins with them, once."""
    starting = tokenizer_that_starts_with(f"{' '.join(start)} $A", *start.items())
    for row in read_corpus(small(jsonl), starting).rows:
        assert row[: len(start)].tolist() == list(start.values())
        assert row[len(start)] != 0


@pytest.mark.parametrize("packing", ["packed", "document"])
def test_fewer_tokens_than_asked_for_is_said(jsonl, tokenizer, packing):
    corpus = read_corpus(small(jsonl, tokens=10**6, packing=packing), tokenizer)
    assert f"{corpus.tokens:,} tokens instead of 1,000,000" in corpus.note


def test_batches_hold_rows_of_equal_length(jsonl, tokenizer):
    corpus = read_corpus(small(jsonl), tokenizer)
    assert [tuple(batch.shape) for batch in corpus.batches(3)] == [(3, 64), (3, 64), (2, 64)]
    assert torch.equal(torch.cat(corpus.batches(3)), torch.stack(corpus.rows))
