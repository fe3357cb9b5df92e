"""The public `RotatedCache`: a 2-bit cache for `generate`, from an artifact or a name in the
zoo."""

import logging
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from rotationzoo.api import pull
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import rotations_for
from rotationzoo.cache import rotated
from rotationzoo.cache.arm import Arm
from rotationzoo.cache.kivi import KiviArm
from rotationzoo.cache.model_checks import check_model
from rotationzoo.cache.settings import Reading, Storage
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration.fit import fit
from rotationzoo.codec.formats import SGLANG, SIMULATED
from rotationzoo.errors import HubError, UsageError
from rotationzoo.evaluation.compatibility import check_artifacts, check_rope, other_weights_note
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.groups import check_group_size
from rotationzoo.model.source import Source, has_weights
from rotationzoo.recipe import PRESETS, Recipe
from rotationzoo.rotations import Rotations
from rotationzoo.words import nearest

_LOG = logging.getLogger(__name__)
KIVI = "kivi"
"""The format with scales of key channels over groups of tokens; see `cache.kivi`."""
Rounding = Literal["nearest", "feedback"]
Layout = Literal["server", "window"]
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
    """How rows get their codes: by error `feedback` where the artifact was calibrated for it, which
    loses fewer answers, and else the `nearest`, as engines write them. Not for `kivi`."""
    prefill_layout: Layout
    """What a chunk of a prompt reads exact of earlier tokens: with `server`, the default, the sink
    alone; with `window` the `recent` tokens before it as well."""
    reading: Reading
    """What a decoding step reads: `rows` that are restored and rotated back, layer by layer, or the
    `pages` of codes themselves. `auto`, the default, reads pages where there is a kernel for it:
    on an NVIDIA GPU. Whatever cannot read pages reads rows."""
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
        check_model(model)
        if isinstance(rotations, str | Path):
            rotations = open_artifact(rotations)
        super().__init__(build_storage(rotations, model, options), model)
        if isinstance(rotations, Artifact):
            _warn_of_other_weights(rotations, model)


def build_storage(rotations: Given, model: PreTrainedModel, options: CacheOptions) -> Storage:
    """What a cache of this model stores. Arguments and errors are those of `RotatedCache`."""
    check_options({**options})
    recipe = Recipe()
    name = "this cache"
    if isinstance(rotations, str | Path):
        rotations = open_artifact(rotations)
    if isinstance(rotations, Artifact):
        recipe, name = rotations.recipe, str(rotations.folder)
        rotations = _fitting(rotations, model)
    elif rotations is None:
        rotations = fit(None, PRESETS["identity"], geometry_of(model))
    elif not isinstance(rotations, Rotations):
        raise UsageError(
            f"an object of type {type(rotations).__name__} holds no rotations",
            hint="give an artifact or its folder, a name in the zoo, or None",
        )
    settings: CacheOptions = {
        "sink": recipe.sink,
        "recent": recipe.recent,
        "format": "sglang",
        **options,
    }
    group_size = settings.get("group_size", recipe.group_size)
    check_group_size(group_size, {rotation.dim for _, _, rotation in rotations.each()})
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
    slack, reading = settings.get("slack", Storage.slack), settings.get("reading", Storage.reading)
    return Storage(arm, windows, slack, reading=reading)


def open_artifact(given: str | Path) -> Artifact:
    """The artifact in a folder, or that of a name in the zoo, which is pulled. Raises
    `RotationZooError` where there is none."""
    if _is_path(given):
        return Artifact.open(Path(given).expanduser())
    try:
        return pull(str(given))
    except HubError as error:
        raise HubError(
            f"{given} is no folder, and pulling it from the zoo fails: {error}",
            hint="check the spelling and the network, or give a folder",
        ) from error


def _fitting(artifact: Artifact, model: PreTrainedModel) -> Rotations:
    """An artifact's rotations for what this model's weights compute. Raises `RotationZooError` for
    another model's artifact, and for weights that carry the equalizer of another one."""
    name = model.name_or_path or type(model).__name__
    check_artifacts(name, [artifact], geometry_of(model))
    check_rope(artifact, model.config)
    folder = Path(name)
    # Weights into which an equalizer was folded come from a folder of this machine.
    if folder.is_dir():
        return rotations_for(artifact, Source(name, folder, None))
    return artifact.rotations


def _warn_of_other_weights(artifact: Artifact, model: PreTrainedModel) -> None:
    """Log a warning where the files of a model are not those that an artifact was made for."""
    source = _source_of(model)
    if source is None or not has_weights(source):
        return
    if note := other_weights_note(artifact, source):
        _LOG.warning("%s; see: rotationzoo verify", note)


def _source_of(model: PreTrainedModel) -> Source | None:
    """Where a model was loaded from, or None where this is not known, or not on this machine."""
    name, commit = model.name_or_path or "", getattr(model.config, "_commit_hash", None)
    if name and Path(name).is_dir():
        return Source(name, Path(name), None)
    config = commit and try_to_load_from_cache(name, "config.json", revision=commit)
    return Source(name, Path(config).parent, commit) if isinstance(config, str) else None


def _is_path(given: str | Path) -> bool:
    """Whether this names a folder of this machine, even one that is missing, and not an entry of
    the zoo: whoever mistypes a folder should not be told about a hub."""
    path = Path(given).expanduser()
    if path.exists() or path.is_absolute() or isinstance(given, Path) or given.startswith("."):
        return True
    # Where `calibrate` puts artifacts, or has put others.
    in_rotations = path.parts[:1] == ("rotations",)
    return len(path.parts) > 1 and (in_rotations or any(path.parent.glob("*/manifest.json")))


def check_options(options: dict[str, Any]) -> None:
    """Raise `UsageError` for options that no cache can have."""
    known = CacheOptions.__annotations__
    if unknown := options.keys() - known:
        name = min(unknown)
        raise UsageError(
            f"a cache has no option {name!r}{nearest(name, known)}",
            hint=f"give some of {', '.join(known)}",
        )
    choices = {"format": (*SIMULATED, KIVI), "rounding": get_args(Rounding)}
    choices |= {"prefill_layout": get_args(Layout), "reading": get_args(Reading)}
    for name, words in choices.items():
        if name in options and options[name] not in words:
            raise UsageError(
                f"there is no {name} {options[name]!r}{nearest(str(options[name]), words)}",
                hint=f"give one of {', '.join(words)}",
            )
    smallest = {"sink": 0, "recent": 0, "slack": 0}
    if options.get("group_size") is not None:
        smallest["group_size"] = 1
    for name, least in smallest.items():
        number = options.get(name, least)
        if not isinstance(number, int) or number < least:
            raise UsageError(
                f"{name} must be a whole number of at least {least}, not {number!r}",
                hint=f"{name}=64",
            )
    if options.get("format") == KIVI:
        _check_kivi(options)


def _check_kivi(options: dict[str, Any]) -> None:
    """Raise `UsageError` for what the format `kivi` would have to ignore."""
    ignored = "group_size" if options.get("group_size") is not None else None
    if options.get("rounding") == "feedback":
        ignored = "rounding"
    if ignored:
        raise UsageError(
            f"the format {KIVI} takes no {ignored} = {options[ignored]!r}",
            hint="leave it out, or give another format",
        )
