"""What a model is asked to continue, and the rows that are cut from what it wrote."""

import json

import pytest
import torch
import transformers
from support.models import DATA

from rotationzoo.recipe import Data
from rotationzoo.text.documents import BUNDLED
from rotationzoo.text.prompts import read_prompts
from rotationzoo.text.rows import pack_texts

SELF = Data(source="self", tokens=1024, length=128, prompt_tokens=16)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DATA / "model")


@pytest.fixture
def chats(tmp_path):
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "third"},
        {"role": "assistant", "content": "fourth"},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turns[: 1 + i % 4]}) + "\n" for i in range(8)))
    return path


def test_prompts_are_spread_over_the_texts(tokenizer):
    found = read_prompts(SELF, tokenizer)
    texts = [json.loads(line)["text"] for line in BUNDLED.read_text().splitlines()]
    pieces = {
        tuple(ids[at : at + 16])
        for ids in tokenizer(texts).input_ids
        for at in range(0, len(ids), SELF.length)
    }
    assert all(tuple(row.tolist()) in pieces for row in found.rows)
    assert len({tuple(row.tolist()) for row in found.rows}) > 50
    assert SELF.tokens <= found.tokens < SELF.tokens + 16, "no more than could be used"


def test_chats_end_where_it_is_the_models_turn(chats, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    whole = read_prompts(SELF.model_copy(update={"prompts": str(chats)}), tokenizer)
    found = {tokenizer.decode(row) for row in whole.rows}
    assert found == {"u:first\na:", "u:first\na:second\nu:third\na:"}
    assert whole.note is None
    short = read_prompts(
        SELF.model_copy(update={"prompts": str(chats), "length": 20, "prompt_tokens": 8}), tokenizer
    )
    assert {tokenizer.decode(row) for row in short.rows} == {"u:first\na:"}
    assert short.note == "4 of 8 chats left out: longer than half a row"


def test_a_start_token_is_given_and_not_doubled(tokenizer):
    """Of a tokenizer that starts every text with one, in prompts and in the rows that are cut from
    what is written."""
    starting = transformers.AutoTokenizer.from_pretrained(DATA / "model")
    starting._tokenizer.post_processor = __import__("tokenizers").processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    prompts = read_prompts(SELF, starting).rows
    assert all(row[0] == 0 and row[1] != 0 for row in prompts)
    rows = pack_texts(
        [torch.cat([row, torch.arange(1, 113)]) for row in prompts], SELF, starting
    ).rows
    assert all(
        torch.equal(row, torch.cat([prompt, torch.arange(1, 113)]))
        for row, prompt in zip(rows, prompts, strict=False)
    )
    assert len(rows) == 8
