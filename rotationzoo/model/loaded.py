"""A model that the caller loaded: it runs as it is, and its files identify it while they are its
own."""

import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.errors import UsageError
from rotationzoo.model.compatibility import source_of
from rotationzoo.model.files import read_headers, weight_files
from rotationzoo.model.loading import input_device
from rotationzoo.model.source import Source


def take_loaded(model: Any, settings: dict[str, Any]) -> Source | None:
    """The source of a loaded model, whose device and type become settings; None for a name. Raises
    `UsageError` for one without a tokenizer, and for settings that only loading heeds."""
    tokenizer = settings.pop("tokenizer", None)
    if isinstance(model, str) and tokenizer is None:
        return None
    if tokenizer is None:
        raise UsageError("a loaded model needs its tokenizer", hint="add: tokenizer=...")
    for name in ("revision", "device", "dtype", "device_map", "max_memory"):
        if settings.pop(name, "auto") != "auto":
            raise UsageError(f"a loaded model takes no {name}", hint=f"leave out {name}")
    settings["device"] = input_device(model).type
    settings["dtype"] = str(model.dtype).removeprefix("torch.")
    return _source_of(model, tokenizer)


def _source_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Source:
    """The source of a loaded model: its files, or a folder with its config alone where there are
    none, or where the model has changed since it was read from them."""
    source = source_of(model)
    if source is None or not _is_in(source.folder, model):
        folder = Path(mkdtemp(prefix="rotationzoo-"), type(model).__name__)
        weakref.finalize(model, shutil.rmtree, folder.parent, ignore_errors=True)
        model.config.save_pretrained(folder)
        source = Source(str(folder), folder, None)
    return replace(source, model=model, tokenizer=tokenizer)


def _is_in(folder: Path, model: PreTrainedModel) -> bool:
    """Whether the files in a folder have the model's config, and the first and the last row of each
    of its weights. Training changes one of them in nearly every tensor."""
    stored, parameters = read_headers(weight_files(folder)), dict(model.named_parameters())
    if not parameters.keys() <= stored.keys():  # as where it was read from a GGUF file
        return False
    if _lines(AutoConfig.from_pretrained(folder)) != _lines(model.config):
        return False
    for name, parameter in parameters.items():
        with safe_open(stored[name].file, "pt") as file:
            tensor = torch.atleast_1d(file.get_tensor(name))
        rows = torch.atleast_1d(parameter)
        same = tensor.shape == rows.shape and not parameter.is_meta
        if not same or not torch.equal(tensor[[0, -1]].to(rows), rows[[0, -1]]):
            return False
    return True


def _lines(config: PretrainedConfig) -> list[str]:
    """A config as text, without the type of the weights, which whoever loads them chooses."""
    return [line for line in config.to_json_string().splitlines() if '"dtype"' not in line]
