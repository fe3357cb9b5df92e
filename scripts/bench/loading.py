"""A loaded model with its geometry and rows of text, as options of a script choose them."""

import argparse
from dataclasses import dataclass, replace

import random_models
import torch
from measuring import DEVICE, make_parser
from transformers import PreTrainedModel

from rotationzoo.geometry import Geometry
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.source import fetch, find
from rotationzoo.recipe import Data
from rotationzoo.text.rows import Corpus, read_corpus


@dataclass(frozen=True)
class Loaded:
    """A model on `DEVICE`, and rows of text in its tokens."""

    model: PreTrainedModel
    geometry: Geometry
    text: Corpus

    def batches(self, size: int) -> list[torch.Tensor]:
        """Batches `[B, T]` of token ids on the model's device."""
        return [ids.to(DEVICE) for ids in self.text.batches(size)]


def make_text_parser(description: str, tokens: int, length: int) -> argparse.ArgumentParser:
    """A parser of the text that a model reads, by default so many `tokens`."""
    parser = make_parser(description)
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--length", type=int, default=length)
    return parser


def load_chosen(name: str, args: argparse.Namespace, dtype: torch.dtype | None = None) -> Loaded:
    """A model of `SHAPES` with random weights and text, or one of a hub id, a folder or `demo` in
    `dtype` or the device's usual type. The options of `make_text_parser` choose the text."""
    if name in random_models.SHAPES:
        shape = random_models.SHAPES[name]
        model = random_models.make_model(replace(shape, positions=max(40_960, args.length)))
        size = args.tokens // args.length, args.length
        text = Corpus([*random_models.random_text(shape.vocabulary, *size)], "random", None)
    else:
        source = find(name)
        fetch(source)
        usual = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        model = loading.load(source, loading.load_config(source), DEVICE, dtype or usual)
        data = Data(source=args.data, tokens=args.tokens, length=args.length)
        text = read_corpus(data, loading.load_tokenizer(source))
    print(
        f"{text.tokens} tokens, rows of {args.length}, {model.dtype}, {DEVICE}, "
        f"{model.config._attn_implementation}, {torch.get_num_threads()} threads"
    )
    with torch.no_grad():
        return Loaded(model, geometry_of(model, text.rows[0][None, :32].to(DEVICE)), text)
