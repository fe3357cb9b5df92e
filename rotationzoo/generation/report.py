"""What a report says of a text, and of the exact model's beside it."""

from typing import Any

from rotationzoo.generation.comparison import find_parting
from rotationzoo.generation.decoding import Continuation
from rotationzoo.generation.prompt import Prompt


def describe_text(prompt: Prompt, text: Continuation) -> dict[str, Any]:
    """A text, why it ended, and how fast prompt and text went; for the demo's own prompt also the
    question and the right answer."""
    length, seconds = len(prompt.ids), text.prompt_seconds
    report = {
        "prompt_tokens": length,
        "prompt_seconds": seconds,
        "prompt_tokens_per_second": length / seconds if seconds else None,
        "text": text.text,
        "tokens": len(text.ids),
        "tokens_per_second": text.tokens_per_second,
        "stop": text.stop,
    }
    if prompt.question:
        report |= {"question": prompt.question, "answer": prompt.answer}
    return report


def compare_texts(text: Continuation, exact: Continuation) -> dict[str, Any]:
    """The exact model's text, and how many characters and tokens are the same before the two
    part."""
    parting = find_parting(text, exact)
    parted_at = None
    if parting is not None:
        parted_at = {"character": parting.character, "token": parting.token}
    return {
        "exact_text": exact.text,
        "exact_tokens": len(exact.ids),
        "exact_tokens_per_second": exact.tokens_per_second,
        "exact_stop": exact.stop,
        "parted_at": parted_at,
    }
