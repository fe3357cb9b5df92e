"""What a 2-bit cache demands of a model before it stores anything."""

from transformers import PreTrainedModel

from rotationzoo.cache.settings import Storage
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model import centering
from rotationzoo.model.geometry import geometry_of, shifted_layers


def check_model(model: object) -> None:
    """Raise `UsageError` for what is no transformers model."""
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"a {type(model).__name__} is no model of transformers",
            hint="give what from_pretrained returns; of a PEFT model, model.get_base_model()",
        )


def check_means(storage: Storage, model: PreTrainedModel) -> None:
    """Raise `RotationZooError` where keys may not lose their mean, as calibration does."""
    rotations = storage.arm.rotations
    if all(sides.key.mean is None for sides in rotations.values()):
        return
    if layers := shifted_layers(geometry_of(model)):
        raise RotationZooError(
            f"keys of this model cannot be centered: {centering.reason(layers)}",
            hint="give rotations of a recipe without center_keys",
        )
