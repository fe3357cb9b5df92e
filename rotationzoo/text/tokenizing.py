"""Tokenizing one document into the ids that a model would see in training or in a request."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.documents import Document, reading_errors


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before every text."""
    # With special tokens, a letter comes after the start tokens; without, it comes alone.
    plain, full = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    return full[: full.index(plain[0])] if plain and plain[0] in full else []


def tokenize(
    document: Document, template: ChatTemplate, data: Data, answer: bool = False
) -> list[int]:
    """The ids of one document, without start tokens: rows get those when they are cut.

    A text ends with the end token, as in training, unless each row is a single document. A chat
    template closes its own turns; with `answer` it also opens the model's turn. Raises
    `RotationZooError` for a chat where the tokenizer has no template, and for text that it cannot
    read.
    """
    tokenizer = template.tokenizer
    if isinstance(document, str):
        text, end = document, _end_tokens(tokenizer, data)
    else:
        text, end = _chat_text(document, template, data, answer), []
    with reading_errors(f"a text of {data.source} cannot be tokenized"):
        # Rows are cut to length later, so the tokenizer's warning about long texts would mislead.
        return [*tokenizer(text, add_special_tokens=False, verbose=False).input_ids, *end]


def _end_tokens(tokenizer: PreTrainedTokenizerBase, data: Data) -> list[int]:
    end = tokenizer.eos_token_id
    return [end] if data.packing != "document" and isinstance(end, int) else []


def _chat_text(
    messages: list[dict[str, Any]], template: ChatTemplate, data: Data, answer: bool
) -> str:
    """A chat in the form of the template, without the start tokens that many templates begin
    with."""
    tokenizer = template.tokenizer
    if tokenizer.chat_template is None:
        raise RotationZooError(
            f"{data.source} holds chat messages and the model's tokenizer has no chat template",
            hint="name a column of plain text with --column",
        )
    with reading_errors(f"a chat of {data.source} does not fit the model's chat template"):
        text = template.render(messages, add_generation_prompt=answer)
    return text.removeprefix(str(tokenizer.decode(start_tokens(tokenizer))))
