import pytest
from support.models import TEXTS, write_jsonl


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
