"""The images and audio that a vision or omni model reads: its processor, the tokens that stand for
them, and a row of both.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rotationzoo.errors import ModelUnavailable, RotationZooError, first_sentence
from rotationzoo.model.loading import input_device
from rotationzoo.model.source import Source
from rotationzoo.recipe import Data

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, ProcessorMixin

_TOWERS = {"image": "vision_config", "audio": "audio_config"}
_NAMES = {"image": "images", "audio": "audio"}


@dataclass(frozen=True)
class MediaRow:
    """A row of token ids with what stands at its media positions, as the model's processor made
    it."""

    ids: torch.Tensor
    """`[1, T]`."""
    is_media: torch.Tensor
    """Which positions `[T]` hold the features of images or audio, and not a token of text."""
    inputs: dict[str, torch.Tensor]
    """What the model takes besides the ids: pixels, their grids, the kinds of tokens."""

    def entering(self, positions: str) -> torch.Tensor:
        """Which positions `[T]` enter the statistics: `all`, those of `text` or of `media`."""
        if positions == "all":
            return torch.ones_like(self.is_media)
        return self.is_media if positions == "media" else ~self.is_media


def check_media(config: "PretrainedConfig", data: Data, name: str) -> None:
    """Raise `RotationZooError` if the data has images or audio that the model cannot read."""
    for kind in data.media:
        if not media_tokens(config, kind):
            raise RotationZooError(
                f"{name} reads no {_NAMES[kind]}, which the data has in column {data.media[kind]}",
                hint=f"leave out --{_NAMES[kind]}, or give a model that reads them",
            )


def media_tokens(config: "PretrainedConfig", kind: str) -> list[int]:
    """The ids of the tokens that a model's config replaces by the features of an `image` or of
    `audio`; none where it has no part that makes such features."""
    if getattr(config, _TOWERS[kind], kind) is None:
        return []
    ids = [getattr(config, f"{kind}_token_{ending}", None) for ending in ("id", "index")]
    return [token for token in ids if isinstance(token, int)]


def load_processor(source: Source) -> "ProcessorMixin":
    """The model's processor. Raises `ModelUnavailable`."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(source.folder, trust_remote_code=False)
    except ImportError as error:
        raise ModelUnavailable(
            f"the processor of {source.name} needs a library that is not installed: "
            f"{first_sentence(error)}",
            hint="install what reads images: pip install 'rotationzoo[media]'",
        ) from error
    except Exception:  # each processor class fails in its own way
        processor = None
    # Where its files are missing, transformers returns the tokenizer alone.
    if not isinstance(processor, ProcessorMixin):
        raise ModelUnavailable(
            f"{source.name} has no readable processor, which prepares images and audio",
            hint="save the model's processor into the same folder: processor.save_pretrained(...)",
        )
    return processor


def run_row(model: "PreTrainedModel", row: MediaRow) -> torch.Tensor:
    """Run a model on a row, without its language-model head where that is a part of its own;
    returns the last states `[1, T, C]` or, with a head, the logits."""
    inputs = {}
    for name, tensor in row.inputs.items():
        dtype = model.dtype if tensor.is_floating_point() else tensor.dtype
        inputs[name] = tensor.to(input_device(model), dtype)
    ids = row.ids.to(input_device(model))
    states: torch.Tensor = model.base_model(input_ids=ids, use_cache=False, **inputs)[0]
    return states
