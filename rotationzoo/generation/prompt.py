"""The tokens that a model reads before it writes: a text as it is, a user's message in the chat
template, or the demo's own prompt."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError, UsageError, as_unavailable
from rotationzoo.evaluation.compatibility import judged_text
from rotationzoo.recall.prompts import PromptSettings, write_prompts
from rotationzoo.recipe import Data
from rotationzoo.recipe.rope import longer_rows_hint, position_count
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.rows import read_corpus, start_tokens

TOKENS = 2048
_SEED = 209
"""Of the demo's own prompt. It was chosen because its answer needs the rotations: with none, with
Hadamard's or with a stranger's, it is wrong (`tests/generation/test_example.py`)."""


@dataclass(frozen=True)
class Prompt:
    """The tokens that a model reads, and how many it may write."""

    ids: torch.Tensor
    """Token ids `[T]`."""
    max_new_tokens: int
    question: str = ""
    """In the demo's own prompt, the line at its end that the model is to complete."""
    answer: str = ""
    """The rest of that line."""

    def check_positions(self, model: str, config: PretrainedConfig) -> None:
        """Raise `UsageError` if prompt and new tokens together exceed the model's positions."""
        positions = position_count(config)
        if positions is None or len(self.ids) + self.max_new_tokens <= positions:
            return
        room = positions - len(self.ids)
        hint = f"give a prompt of fewer than {positions:,} tokens"
        if room > 0:
            hint = f"add: --max-new-tokens {room}, or give a shorter prompt"
        raise UsageError(
            f"a prompt of {len(self.ids):,} tokens and {self.max_new_tokens:,} new ones exceed the "
            f"{positions:,} positions of {model}",
            hint=longer_rows_hint(config, len(self.ids) + self.max_new_tokens, hint),
        )


def encode_prompt(
    text: str, tokenizer: PreTrainedTokenizerBase, model: str, chat: bool, positions: int | None
) -> torch.Tensor:
    """The ids `[T]` of a text after the tokenizer's start tokens, or of a chat in which a user has
    said it and the model is to answer. Raises `UsageError` for a chat where there is no template,
    and for a text that is too long for `positions`, and `RotationZooError` for a refused text."""
    start = start_tokens(tokenizer)
    if chat:
        text, start = _apply_template(text, tokenizer, model), []
    _check_size(text, tokenizer, model, positions)
    with as_unavailable(f"the prompt cannot be tokenized for {model}", hint="give another prompt"):
        # `check_positions` says in its place what the tokenizer would warn of.
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not ids:
        raise RotationZooError(
            f"the tokenizer of {model} makes no token of the prompt", hint="give another prompt"
        )
    return torch.tensor([*start, *ids])


def _check_size(
    text: str, tokenizer: PreTrainedTokenizerBase, model: str, positions: int | None
) -> None:
    """Raise `UsageError` for a text of more bytes than tokens of the longest kind could hold: to
    tokenize it would take a hundred times its size in memory."""
    size = len(text.encode(errors="surrogatepass"))
    if positions is None or size <= positions:
        return
    longest = max(len(word.encode(errors="surrogatepass")) for word in tokenizer.get_vocab())
    if size > positions * longest:
        raise UsageError(
            f"a prompt of {size:,} bytes exceeds the {positions:,} positions of {model}, whose "
            f"tokens have at most {longest} bytes",
            hint="give a shorter prompt",
        )


def _apply_template(text: str, tokenizer: PreTrainedTokenizerBase, model: str) -> str:
    """The text of a chat up to the point where the model's answer begins."""
    if tokenizer.chat_template is None:
        raise UsageError(
            f"the tokenizer of {model} has no chat template",
            hint="leave out --chat, and the model continues the prompt as a text",
        )
    messages = [{"role": "user", "content": text}]
    with as_unavailable(
        f"the chat template of {model} refuses the prompt", hint="leave out --chat"
    ):
        return ChatTemplate(tokenizer).render(messages, add_generation_prompt=True)


def write_example(
    tokenizer: PreTrainedTokenizerBase, sink: int, recent: int, max_new_tokens: int | None
) -> Prompt:
    """The demo model's own prompt, for a user who gives none: nearly `TOKENS` tokens of held-out
    code, in which lines of random words lie between the exact windows. Its last line begins one of
    them, of which the model may write the rest, unless `max_new_tokens` says otherwise. Raises
    `RotationZooError` for windows that leave no room."""
    text = judged_text(Data(tokens=TOKENS, length=TOKENS))
    filler = read_corpus(text, tokenizer).rows[0].tolist()
    settings = PromptSettings("copy", 1, TOKENS, first=sink, recent=recent, seed=_SEED)
    (hidden,) = write_prompts(settings, tokenizer, filler)
    question = hidden.questions[-1]  # after the others and their answers
    ids: torch.Tensor = hidden.ids[: question.answer.start]
    answer = hidden.ids[question.answer]
    line = str(tokenizer.decode(ids)).splitlines()[-1]
    return Prompt(ids, max_new_tokens or len(answer), line, str(tokenizer.decode(answer)))
