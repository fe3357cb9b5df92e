"""The public `RotatedCache`: a 2-bit cache for `generate`, from an artifact or a name in the
zoo."""

from pathlib import Path
from typing import Literal, TypedDict, Unpack

from transformers import PreTrainedModel

from rotationzoo.api import pull
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import rotations_for
from rotationzoo.cache import rotated
from rotationzoo.cache.arm import Arm
from rotationzoo.cache.kivi import KiviArm
from rotationzoo.cache.settings import Storage
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.fit import fit
from rotationzoo.codec.formats import SGLANG, SIMULATED
from rotationzoo.errors import UsageError
from rotationzoo.evaluation.compatibility import check_artifacts
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.source import Source
from rotationzoo.recipe import PRESETS, Recipe
from rotationzoo.rotations import Rotations

KIVI = "kivi"
"""The format with scales of key channels over groups of tokens; see `cache.kivi`."""
Rounding = Literal["nearest", "feedback"]
Given = str | Path | Artifact | Rotations | None


class CacheOptions(TypedDict, total=False):
    """Further options of `RotatedCache`."""

    format: str
    """`sglang` (the default), `vllm`, `mlx` or `kivi`."""
    sink: int
    recent: int
    """How many first and last tokens stay exact. They default to the recipe's."""
    group_size: int
    """Channels that share a scale; by default the recipe's, or the whole head. Not for `kivi`."""
    rounding: Rounding
    """How keys get their codes: by error `feedback` where the artifact was calibrated for it, which
    loses fewer answers, and else the `nearest`, as engines write them. Not for `kivi`."""
    prefill_layout: Literal["server", "window"]
    """What a chunk of a prompt reads exact of earlier tokens: with `server`, the default, the sink
    alone; with `window` the `recent` tokens before it as well."""
    slack: int
    """How many candidate tokens assisted decoding may take back, 64 by default."""


class RotatedCache(rotated.RotatedCache):
    """A KV cache that stores 2 bits: `model.generate(..., past_key_values=RotatedCache(...))`.

    * `rotations`: an artifact or its folder, a name in the zoo, which is pulled, or `Rotations`.
      None is for no rotation at all;
    * `model`: the transformers model that will read the cache;
    * `options`: see `CacheOptions`.

    A cache serves one request, or one batch. `cache.reset()` empties it for the next. Raises
    `RotationZooError` where the rotations do not fit the model, and `UnsupportedModel` for a model
    whose keys and values this cache cannot store.
    """

    def __init__(
        self, rotations: Given, model: PreTrainedModel, **options: Unpack[CacheOptions]
    ) -> None:
        super().__init__(build_storage(rotations, model, options), model)


def build_storage(rotations: Given, model: PreTrainedModel, options: CacheOptions) -> Storage:
    """What a cache of this model stores. Arguments and errors are those of `RotatedCache`."""
    recipe = Recipe()
    if isinstance(rotations, str | Path):
        is_folder = Path(rotations).expanduser().is_dir()
        rotations = Artifact.open(rotations) if is_folder else pull(str(rotations))
    if isinstance(rotations, Artifact):
        recipe = rotations.recipe
        rotations = _fitting(rotations, model)
    elif rotations is None:
        rotations = fit(None, PRESETS["identity"], geometry_of(model))
    settings: CacheOptions = {
        "sink": recipe.sink,
        "recent": recipe.recent,
        "format": "sglang",
        **options,
    }
    _check(settings)
    group_size = settings.get("group_size", recipe.group_size)
    name = "this cache"
    default: Rounding = "feedback" if rotations.has_feedback else "nearest"
    arm = Arm(name, rotations, group_size, settings.get("rounding", default))
    if settings["format"] == KIVI:
        arm = KiviArm(name, rotations)
    windows = Cache(
        SIMULATED.get(settings["format"], SGLANG),
        settings["sink"],
        settings["recent"],
        prefill_layout=settings.get("prefill_layout", "server"),
    )
    return Storage(arm, windows, settings.get("slack", Storage.slack))


def _fitting(artifact: Artifact, model: PreTrainedModel) -> Rotations:
    """An artifact's rotations for what this model's weights compute. Raises `RotationZooError` for
    another model's artifact, and for weights that carry the equalizer of another one."""
    name = model.name_or_path or type(model).__name__
    check_artifacts(name, [artifact], geometry_of(model))
    folder = Path(name)
    # Weights into which an equalizer was folded come from a folder of this machine.
    if folder.is_dir():
        return rotations_for(artifact, Source(name, folder, None))
    return artifact.rotations


def _check(settings: CacheOptions) -> None:
    """Raise `UsageError` for settings that no cache can have."""
    formats = [*SIMULATED, KIVI]
    if settings["format"] not in formats:
        raise UsageError(
            f"there is no format {settings['format']!r}", hint=f"give one of {', '.join(formats)}"
        )
    numbers = {"sink": settings["sink"], "recent": settings["recent"]}
    numbers["slack"] = settings.get("slack", 0)
    for name, number in numbers.items():
        if number < 0:
            raise UsageError(f"{name} must be at least 0", hint=f"{name}=64")
