"""The number of positions of a model, and RoPE scaled to more positions than its config has."""

import math
from typing import TYPE_CHECKING, Any

from rotationzoo.errors import RotationZooError, as_unavailable
from rotationzoo.recipe.schema import RopeScaling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_UNSCALED = "give no --rope-scaling, nor a recipe or rotations that were made with one"
_TRAINED = "original_max_position_embeddings"
_FULL = "full_attention"  # the layer type whose RoPE is scaled: sliding windows stay as they are


def position_count(config: "PretrainedConfig") -> int | None:
    """The model's positions with its RoPE scaling, or None. A linear or dynamic factor multiplies
    the config's positions, as in vLLM; YaRN's multiplies the trained ones."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    parameters = _parameters(config)
    kind, factor = parameters.get("rope_type"), parameters.get("factor") or 1
    if kind == "yarn":
        return max(positions, int(factor * (parameters.get(_TRAINED) or positions)))
    # The positions in Gemma 3's config include the factor.
    multiplies = kind in ("linear", "dynamic") and "gemma3" not in config.model_type
    return int(factor * positions) if multiplies else positions


def changing_at(config: "PretrainedConfig") -> int | None:
    """The largest number of tokens with LongRoPE's short factors; None for any other RoPE."""
    parameters = _parameters(config)
    return parameters.get(_TRAINED) if parameters.get("rope_type") == "longrope" else None


def scaling_of(config: "PretrainedConfig") -> str | None:
    """The RoPE scaling of a config, such as `yarn:4:32768` or `longrope`; None for plain RoPE."""
    parameters = _parameters(config)
    kind = parameters.get("rope_type", "default")
    if kind in ("default", "axial", "proportional"):  # these do not change the length
        return None
    factor = parameters.get("factor")
    if factor is None:
        return str(kind)
    return str(RopeScaling(kind, factor, parameters.get(_TRAINED)))


def apply_scaling(config: "PretrainedConfig", scaling: str | None, name: str) -> None:
    """Set this scaling, if any, in a config. Raises `RotationZooError` if it cannot be scaled."""
    if scaling is None:
        return
    wanted = RopeScaling.parse(scaling)
    text: Any = config.get_text_config(decoder=True)
    parameters = _parameters(config)
    trained = position_count(config)
    if not parameters or trained is None:
        problem = f"{name} has no RoPE of full attention, or of all layers, to be scaled"
        raise RotationZooError(problem, _UNSCALED)
    present = scaling_of(config)
    if present is not None:
        if not same_scaling(scaling, present):
            problem = f"the config of {name} scales its RoPE already ({present})"
            raise RotationZooError(f"{problem}, and cannot be scaled by {wanted}", _UNSCALED)
        return
    original = wanted.positions or trained
    scaled = {**parameters, "rope_type": wanted.kind, "factor": wanted.factor}
    if wanted.kind == "yarn":
        scaled[_TRAINED] = original
    whole = text.rope_parameters
    with as_unavailable(f"the RoPE of {name} cannot be scaled by {wanted}", hint=_UNSCALED):
        text.rope_parameters = {**whole, _FULL: scaled} if _FULL in whole else scaled
        text.max_position_embeddings = original
        if wanted.kind == "yarn" or position_count(config) == original:
            text.max_position_embeddings = int(wanted.factor * original)
        text.validate_rope()


def same_scaling(wanted: str | None, present: str | None) -> bool:
    """Whether a config has the wanted scaling (any if None), whose positions are optional."""
    if wanted is None or present is None:
        return wanted is None
    if wanted.startswith("linear:"):
        wanted = ":".join(wanted.split(":")[:2])
    return wanted == present or (wanted.count(":") == 1 and present.startswith(f"{wanted}:"))


def check_positions(config: "PretrainedConfig", tokens: int, what: str, shorter: str) -> None:
    """Raise `RotationZooError` for more `tokens` than positions, which fill `{}` in `shorter`."""
    positions = position_count(config)
    if positions is not None and tokens > positions:
        says = f"{what} of {tokens} tokens are longer than the {positions} positions of the model"
        hint = longer_rows_hint(config, tokens, shorter.format(positions))
        raise RotationZooError(says, hint)


def longer_rows_hint(config: "PretrainedConfig", tokens: int, shorter: str) -> str:
    """The hint for rows longer than the model's positions: `shorter`, or scaled RoPE."""
    positions = position_count(config)
    if positions is None or not _parameters(config) or scaling_of(config) is not None:
        return shorter
    return f"{shorter}, or --rope-scaling yarn:{math.ceil(tokens / positions)}"


def _parameters(config: "PretrainedConfig") -> dict[str, Any]:
    """The RoPE parameters of full attention; empty if there are none."""
    text = config.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    full = parameters.get(_FULL) or parameters
    is_of_others = any(isinstance(each, dict) for each in full.values())
    return {} if is_of_others else full
