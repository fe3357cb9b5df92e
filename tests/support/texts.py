"""Small calibration texts, and tokenizers to read them with."""

from pathlib import Path

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rotationzoo.recipe import Data
from support.models import DATA

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n" * 5 for i in range(40)]


def small(source: str | Path, **changes) -> Data:
    """Eight rows of 64 tokens of a source."""
    return Data(**{"source": str(source), "tokens": 512, "length": 64, **changes})


def demo_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DATA / "model")


def tokenizer_that_starts_with(template: str, *special: tuple[str, int]) -> PreTrainedTokenizerBase:
    """The demo model's tokenizer with special tokens before every text, as `template` has them."""
    tokenizer = demo_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=list(special)
    )
    return tokenizer
