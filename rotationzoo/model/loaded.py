"""A model that the caller loaded: it runs as it is, and its files identify it while they are its
own."""

import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.model.compatibility import source_of
from rotationzoo.model.files import read_headers, weight_files
from rotationzoo.model.source import Source


def source_of_loaded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Source:
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
    stored, config = read_headers(weight_files(folder)), AutoConfig.from_pretrained(folder)
    parameters = dict(model.named_parameters())
    if _lines(config) != _lines(model.config) or not parameters.keys() <= stored.keys():
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
