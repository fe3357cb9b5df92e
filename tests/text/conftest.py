import pytest
from support.models import TEXTS, demo_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
