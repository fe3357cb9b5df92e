"""The demo model's own prompt, for whoever gives none: a statement hidden in code, asked for at the
end."""

import torch
from transformers import PreTrainedTokenizerBase

from rotationzoo.evaluation.compatibility import judged_text
from rotationzoo.generation.prompt import Prompt
from rotationzoo.recall.prompts import PromptSettings, write_prompts
from rotationzoo.recipe import Data
from rotationzoo.text.rows import read_corpus

TOKENS = 2048


def write_example(
    tokenizer: PreTrainedTokenizerBase, sink: int, recent: int, max_new_tokens: int | None
) -> Prompt:
    """A prompt of nearly `TOKENS` tokens of held-out code, whose last line asks for a statement
    that lies between the exact windows.

    The model may write as many tokens as the answer has, unless `max_new_tokens` says otherwise.
    Raises `RotationZooError` for windows that leave no room.
    """
    text = judged_text(Data(tokens=TOKENS, length=TOKENS))
    filler = read_corpus(text, tokenizer).rows[0].tolist()
    settings = PromptSettings("needles", 1, TOKENS, questions=1, first=sink, recent=recent)
    (hidden,) = write_prompts(settings, tokenizer, filler)
    (question,) = hidden.questions
    ids: torch.Tensor = hidden.ids[: question.answer.start]
    answer = hidden.ids[question.answer]
    line = str(tokenizer.decode(ids)).splitlines()[-1]
    return Prompt(ids, max_new_tokens or len(answer), line, str(tokenizer.decode(answer)))
