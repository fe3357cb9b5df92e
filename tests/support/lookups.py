"""A model with written weights that looks things up, and whose predictions are otherwise about
something else: what is best for the one is not for the other."""

import random

import torch
import transformers
from transformers import PreTrainedModel

from rotationzoo.recall.prompts import Prompt, Question

NAMES, VALUES, CLASSES = 4, 4, 4
_HIDDEN, _DIM, _WIDE = 32, 16, 8.0
# Token ids. A statement gives a value to a name; a filler belongs to a class.
_STATEMENTS, _QUERIES, _ANSWERS, _FILLERS, _VOCABULARY = 4, 20, 24, 28, 40
# Features of an embedding: what a key stores, what it carries, and what a query looks for.
_STORED, _CARRIED, _SOUGHT, _READ, _REST = 0, 7, 15, 22, 30
_LENGTH = 200.0  # the squared length of every embedding, before a norm makes it that of `_HIDDEN`
_SCALE = (_HIDDEN / _LENGTH) ** 0.5
# Key channels that RoPE turns too slowly to matter: four for classes, one for fillers, two for
# names.
_CHANNELS = [4, 5, 6, 7, 12, 13, 14]


def lookup_model() -> PreTrainedModel:
    """A Llama of one layer and one head.

    After a query, it reads the statement of its name, whose key is one towering channel. After a
    filler, it reads fillers of the same class, whose keys differ in channels that a towering one,
    which nobody reads, would drown unless it is clipped.
    """
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=_HIDDEN, intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=_DIM, max_position_embeddings=128,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e12},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        attention, layer = model.model.layers[0].self_attn, model.model.layers[0]
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(_embeddings())
        for number, channel in enumerate(_CHANNELS):
            attention.k_proj.weight[channel, _STORED + number] = 1 / _SCALE
            attention.q_proj.weight[channel, _SOUGHT + number] = 1 / _SCALE
        for number in range(VALUES + CLASSES):
            attention.v_proj.weight[number, _CARRIED + number] = 1 / _SCALE
            attention.o_proj.weight[_READ + number, number] = 1.0
        for number in range(VALUES):
            model.lm_head.weight[_ANSWERS + number, _READ + number] = 40.0
        for filler in range(2 * CLASSES):
            model.lm_head.weight[_FILLERS + filler, _READ + VALUES + filler // 2] = 20.0
    return model


def _embeddings() -> torch.Tensor:
    """Embeddings `[vocabulary, hidden]` of one length, which a norm leaves as they are."""
    table = torch.zeros(_VOCABULARY, _HIDDEN)
    for name in range(NAMES):
        channel, sign = CLASSES + 1 + name // 2, 1 - 2 * (name % 2)
        table[_QUERIES + name, _SOUGHT + channel] = 6.0 * sign
        for value in range(VALUES):
            statement = table[_STATEMENTS + VALUES * name + value]
            statement[_STORED + channel] = _WIDE * sign
            statement[_CARRIED + value] = 1.0
    for filler in range(2 * CLASSES):
        row = table[_FILLERS + filler]
        row[_STORED + filler // 2] = 1.0
        row[_STORED + CLASSES] = _WIDE * (1 - 2 * (filler % 2))
        row[_CARRIED + VALUES + (filler // 2 + 1) % CLASSES] = 1.0
        row[_SOUGHT + filler // 2] = 10.0
    table[:, _REST] = (_LENGTH - table.square().sum(1)).sqrt()
    return table * _SCALE


def filler_rows(count: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """Rows `[T]` without anything to look up."""
    draw = random.Random(seed)
    fillers = range(_FILLERS, _FILLERS + 2 * CLASSES)
    return [torch.tensor(draw.choices(fillers, k=length)) for _ in range(count)]


def lookup_prompts(count: int, length: int, seed: int = 0) -> list[Prompt]:
    """Prompts that give every name a value and ask for each, in another order, at the end."""
    draw = random.Random(seed)
    prompts = []
    for row in filler_rows(count, length, seed):
        sources = draw.sample(range(4, length - 4 * NAMES), NAMES)
        values = draw.choices(range(VALUES), k=NAMES)
        for name, (source, value) in enumerate(zip(sources, values, strict=True)):
            row[source] = _STATEMENTS + VALUES * name + value
        questions = []
        for place, name in enumerate(draw.sample(range(NAMES), NAMES)):
            start = length - 2 * (NAMES - place)
            row[start], row[start + 1] = _QUERIES + name, _ANSWERS + values[name]
            questions.append(Question("needles", slice(start + 1, start + 2), sources[name]))
        prompts.append(Prompt(row, tuple(questions)))
    return prompts
