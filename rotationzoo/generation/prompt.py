"""The tokens that a model reads before it writes: a text as it is, or a user's message in the chat
template."""

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rotationzoo.errors import RotationZooError, UsageError, as_unavailable
from rotationzoo.recipe.rope import longer_rows_hint, position_count
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.rows import start_tokens


def encode_prompt(
    text: str, tokenizer: PreTrainedTokenizerBase, model: str, chat: bool, config: PretrainedConfig
) -> torch.Tensor:
    """The ids `[T]` of a text after the tokenizer's start tokens, or of a chat in which a user has
    said it, up to where the model answers. Raises `UsageError` for a chat where there is no
    template, and for a text that is too long for the model's positions, and `RotationZooError` for
    a refused text."""
    start, positions = start_tokens(tokenizer), position_count(config)
    if chat and tokenizer.chat_template is None:
        raise UsageError(
            f"the tokenizer of {model} has no chat template",
            hint="leave out --chat, and the model continues the prompt as a text",
        )
    if chat:
        messages = [{"role": "user", "content": text}]
        refused = f"the chat template of {model} refuses the prompt"
        with as_unavailable(refused, hint="leave out --chat"):
            text = ChatTemplate(tokenizer).render(messages, add_generation_prompt=True)
        start = []
    size = len(text.encode(errors="surrogatepass"))
    if positions is not None and size > positions:
        words = tokenizer.get_vocab()
        longest = max(len(word.encode(errors="surrogatepass")) for word in words)
        # To tokenize it would take a hundred times its size in memory.
        if size > positions * longest:
            raise UsageError(
                f"a prompt of {size:,} bytes exceeds the {positions:,} positions of {model}, whose "
                f"tokens have at most {longest} bytes",
                hint="give a shorter prompt",
            )
    with as_unavailable(f"the prompt cannot be tokenized for {model}", hint="give another prompt"):
        # `check_positions` says in its place what the tokenizer would warn of.
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not ids:
        raise RotationZooError(
            f"the tokenizer of {model} makes no token of the prompt", hint="give another prompt"
        )
    return torch.tensor([*start, *ids])


def check_positions(prompt: int, new: int, model: str, config: PretrainedConfig) -> None:
    """Raise `UsageError` if a prompt of so many tokens and `new` ones together exceed the model's
    positions."""
    positions = position_count(config)
    if positions is None or prompt + new <= positions:
        return
    hint = f"give a prompt of fewer than {positions:,} tokens"
    if positions > prompt:
        hint = f"add: --max-new-tokens {positions - prompt}, or give a shorter prompt"
    raise UsageError(
        f"a prompt of {prompt:,} tokens and {new:,} new ones exceed the {positions:,} positions of "
        f"{model}",
        hint=longer_rows_hint(config, prompt + new, hint),
    )
