"""Adapters of a model (LoRA), in folders as peft writes them: with one, an evaluation says what
rotations keep that were calibrated without it."""

from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedModel

from rotationzoo.errors import RotationZooError, as_unavailable


def check_adapter(folder: Path) -> None:
    """Raise `RotationZooError` for a folder without an adapter, and where peft is missing."""
    if not (folder / "adapter_config.json").is_file():
        raise RotationZooError(
            f"{folder} holds no adapter: it has no adapter_config.json",
            hint="give a folder that peft's save_pretrained has written",
        )
    if find_spec("peft") is None:
        raise RotationZooError("peft is not installed", hint="run: pip install 'peft>=0.18'")


def add_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Let the model compute with an adapter of the folder. Raises `ModelUnavailable` for one of
    another model."""
    with as_unavailable(f"{folder} does not fit the model", "give an adapter of this model"):
        found = model.load_adapter(str(folder))
        # Transformers only warns of an adapter of fewer or more layers.
        if other := sorted((found.missing_keys or set()) | (found.unexpected_keys or set())):
            raise ValueError(f"only one of them has {other[0]}")
    model.eval()
