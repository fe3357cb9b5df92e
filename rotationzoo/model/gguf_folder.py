"""A folder that stands for a GGUF file.

It has the config and the tokenizer that transformers reads from the file, and a link to it, and
lasts as long as the process.
"""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from rotationzoo.errors import RotationZooError, UnsupportedModel, as_unavailable
from rotationzoo.model.files import GGUF, check_configs
from rotationzoo.recipe.rope import scaling_of

_OTHER = "give the model that it was converted from"
DTYPE = torch.bfloat16
"""What weights become where no type is asked for: transformers would choose float32."""


@cache
def stand_in(path: Path, name: str) -> Path:
    """Make the folder for a file. Raises `RotationZooError` for no GGUF file and where the package
    that reads them is missing, `ModelUnavailable` for what transformers does not read of it, and
    `UnsupportedModel` where it would leave out what the file says of RoPE."""
    from transformers import AutoConfig, AutoTokenizer

    from rotationzoo.storage.gguf_reader import open_gguf

    reader = open_gguf(path, lists=False)
    if reader.value("split.count") not in (None, 0, 1):
        join = "join them first with: llama-gguf-split --merge"
        raise RotationZooError(f"{name} is one part of several", hint=join)
    # Its name is what is published of the path.
    folder = Path(mkdtemp(prefix="rotationzoo-"), path.name)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    folder.mkdir()
    (folder / GGUF).symlink_to(path.resolve())
    with as_unavailable(f"transformers cannot read the config in {name}", hint=_OTHER):
        config = AutoConfig.from_pretrained(folder, gguf_file=GGUF)
        config.dtype = DTYPE
        config.save_pretrained(folder)
    check_configs(folder, name)
    scaling = reader.value(f"{reader.value('general.architecture')}.rope.scaling.type")
    scaled = scaling not in (None, "none")
    scaled |= any(tensor.name.startswith("rope_") for tensor in reader.tensors)
    if scaled and not scaling_of(config):
        raise UnsupportedModel(
            f"{name} scales RoPE, which transformers does not read from a GGUF file", hint=_OTHER
        )
    with as_unavailable(f"transformers cannot read the tokenizer in {name}", hint=_OTHER):
        AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(folder)
    return folder
