"""Prompts for text that the model writes itself: beginnings of texts, and chats up to the model's
turn."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.documents import read_documents
from rotationzoo.text.rows import Corpus, fingerprint, start_tokens, tokenize


def read_prompts(data: Data, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """One prompt per row, taken from every `length` tokens of a text. There are enough prompts to
    fill the rows of `data` by themselves. Raises as `rows.read_corpus`."""
    # As documents, texts get no end token: the model is to continue them.
    source = data.model_copy(update={"source": data.prompts, "packing": "document"})
    start = start_tokens(tokenizer)
    room = max(data.prompt_tokens, data.length // 2)
    rows: list[torch.Tensor] = []
    skipped, left = 0, data.tokens
    try:
        for prompt in _prompts(source, tokenizer, data.prompt_tokens - len(start)):
            if len(start) + len(prompt) <= room:
                rows.append(torch.tensor([*start, *prompt]))
            else:
                skipped += 1
            left -= len(prompt)
            if left <= 0:
                break
    except RotationZooError as error:
        hint = (error.hint or "").replace("--data", "--prompts")
        raise RotationZooError(str(error), hint=hint) from error
    if not rows:
        raise RotationZooError(
            f"{data.prompts} has no prompt that leaves room in rows of {data.length} tokens",
            hint="give shorter ones with --prompts, or longer rows with --length",
        )
    note = None
    if skipped:
        note = f"{skipped} of {skipped + len(rows)} chats left out: longer than half a row"
    return Corpus(rows, fingerprint(rows), note)


def _prompts(data: Data, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Iterator[list[int]]:
    """The first `tokens` of every `length` tokens of a text, and whole chats."""
    template = ChatTemplate(tokenizer)
    for document in read_documents(data):
        if isinstance(document, str):
            ids = tokenize(document, template, data)
            for start in range(0, len(ids), data.length):
                yield ids[start : start + max(tokens, 1)]
        else:
            yield tokenize(_until_answer(document), template, data, answer=True)


def _until_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat up to the point where the model's last turn begins."""
    questions = [
        number for number, message in enumerate(messages, 1) if message["role"] != "assistant"
    ]
    return messages[: questions[-1]] if questions else messages
