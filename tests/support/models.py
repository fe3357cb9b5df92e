"""Tiny models of every family, saved as transformers saves them."""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rotationzoo.model import loading
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.source import find
from rotationzoo.recipe import Data
from support.places import ROOT

DATA = ROOT / "rotationzoo" / "data" / "demo"


def save_random(
    kind: str, config: str, folder: Path, std: float, seed: int = 0, **options
) -> transformers.PreTrainedModel:
    """A random model with the demo model's tokenizer, as save_pretrained writes it. `kind` and
    `config`: the names of its classes without their endings."""
    torch.manual_seed(seed)
    made = getattr(transformers, f"{config}Config")(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    randomize(model, std)
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module, std: float) -> None:
    """Draw every matrix of a model anew."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=std)


def save_tiny(folder: Path, seed: int = 0, **changes) -> Path:
    """A random Qwen3 of two layers."""
    options = dict(
        vocab_size=2048, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=0,
    )  # fmt: skip
    save_random("Qwen3", "Qwen3", folder, std=0.2, seed=seed, **{**options, **changes})
    return folder


def add_tokenizer(folder: Path) -> Path:
    """Put the demo model's tokenizer beside a saved model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "model" / name, folder)
    return folder


def save_family(name: str, folder: Path, weights: bool = True, **options) -> Path:
    """A tiny model of one of the families in `architectures.py` with the demo model's tokenizer, or
    its config alone."""
    from support import architectures

    changes = dict(
        vocab_size=2048, max_position_embeddings=2048, bos_token_id=None, eos_token_id=0, **options
    )
    if name == "gemma4":
        changes["vocab_size_per_layer_input"] = 2048
    if name.endswith("vlm"):
        changes = {"text_config": architectures.config(name).text_config.to_dict() | changes}
    if weights:
        architectures.build(name, **changes).save_pretrained(folder)
    else:
        config = architectures.config(name, **changes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    return add_tokenizer(folder)


def edit_config(folder: Path, name: str = "config.json", /, **changes) -> Path:
    """Change the config of a saved model, or of its tokenizer."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@contextmanager
def edited_weights(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of a saved model, which are written when the block ends."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    yield weights
    save_file(weights, path, metadata={"format": "pt"})


def load_saved(
    folder: Path | str, dtype: torch.dtype | str = torch.float32
) -> transformers.PreTrainedModel:
    """A saved model, as the commands load it."""
    source = find(str(folder))
    return loading.load(source, loading.load_config(source), "cpu", dtype)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a saved model."""
    return loading.load_tokenizer(find(str(folder)))


@torch.no_grad()
def attention_calls(
    model: transformers.PreTrainedModel, batches: Iterable[torch.Tensor]
) -> dict[int, list[tuple[torch.Tensor, ...]]]:
    """Layer -> for each batch, the queries, keys, values and outputs `[rows, heads, T, D]` of its
    attention."""
    calls = defaultdict(list)
    with capture(model, lambda layer, *rows: calls[layer].append(rows)):
        for ids in batches:
            decoder(model)(input_ids=ids, use_cache=False)
    return calls


def write_jsonl(path: Path, records: Iterable[dict]) -> Path:
    """A file with one record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


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
