"""Texts and chats as token ids."""

import pytest
import torch
from support.models import TEXTS, demo_tokenizer, small, write_jsonl

from rotationzoo.errors import RotationZooError
from rotationzoo.text.rows import read_corpus


def test_messages_go_through_the_chat_template(tmp_path, tokenizer):
    chats = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    with pytest.raises(RotationZooError, match="no chat template"):
        read_corpus(small(path), tokenizer)
    chatty = demo_tokenizer()
    chatty.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    assert "[user] def function" in tokenizer.decode(
        torch.cat(read_corpus(small(path), chatty).rows)
    )


def test_text_that_cannot_be_tokenized(tmp_path, tokenizer):
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(RotationZooError, match="cannot be tokenized"):
        read_corpus(small(tmp_path / "half.jsonl"), tokenizer)


def test_a_chat_that_does_not_fit_the_template(tmp_path):
    strict = demo_tokenizer()
    strict.chat_template = "{{ raise_exception('no system role') }}"
    chat = {"messages": [{"role": "system", "content": "x"}]}
    path = write_jsonl(tmp_path / "chat.jsonl", [chat])
    words = "does not fit the model's chat template: no system role"
    with pytest.raises(RotationZooError, match=words):
        read_corpus(small(path), strict)
