"""A loaded model with its geometry and rows of text, as options of a script choose them."""

import argparse
from dataclasses import dataclass

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
    """A parser of the model and of the text that it reads, by default so many `tokens`."""
    parser = make_parser(description)
    parser.add_argument("model")
    parser.add_argument("--data", default="bundled")
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--length", type=int, default=length)
    return parser


def load_chosen(args: argparse.Namespace, dtype: torch.dtype | None = None) -> Loaded:
    """What the options of `make_text_parser` chose, in `dtype` or the device's usual type."""
    if dtype is None:
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    data = Data(source=args.data, tokens=args.tokens, length=args.length)
    loaded = load(args.model, dtype, data)
    print(
        f"{loaded.text.tokens} tokens, rows of {args.length}, {dtype}, {DEVICE}, "
        f"{loaded.model.config._attn_implementation}, {torch.get_num_threads()} threads"
    )
    return loaded


def load(model: str, dtype: torch.dtype, data: Data) -> Loaded:
    """Load a model by its hub id, folder or `demo`, with the text that `data` describes."""
    source = find(model)
    fetch(source)
    loaded = loading.load(source, loading.load_config(source), DEVICE, dtype)
    text = read_corpus(data, loading.load_tokenizer(source))
    with torch.no_grad():
        geometry = geometry_of(loaded, text.rows[0][None, :32].to(DEVICE))
    return Loaded(loaded, geometry, text)
