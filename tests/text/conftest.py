import json

import pytest
from support.models import TEXTS, demo_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path
