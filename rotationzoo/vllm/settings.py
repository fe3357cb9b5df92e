"""The settings of a server's cache, from our options in vLLM's `additional_config`."""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec import cuda_attention, cuda_latents
from rotationzoo.codec import settings as caches
from rotationzoo.codec.cuda import INSTALL
from rotationzoo.codec.cuda_encoder import kernels_run_on
from rotationzoo.codec.engine_needs import check_sides, find_engine
from rotationzoo.codec.int2 import check_shape
from rotationzoo.codec.options import CacheOptions
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import full_attention_layers, shares_blocks
from rotationzoo.linalg.orthogonality import one_thread
from rotationzoo.rotations import SIDES, Rotation
from rotationzoo.sides import LATENT, LATENTS
from rotationzoo.storage import strict_json
from rotationzoo.vllm import KEY, SERVE


class Options(strict_json.Strict, extra="forbid"):
    """The settings under `KEY`."""

    artifact: str  # its folder
    format: Literal["sglang", "vllm", "segments"] | None = None
    """By default `segments` if the artifact has transform coding, otherwise `vllm`."""
    bits: float | None = None  # per element, in place of the artifact's budget, which it must have
    sink: int | None = Field(default=None, ge=0)
    recent: int | None = Field(default=None, ge=1)
    """First and last tokens that stay exact (the recipe's). A new token reads itself exact."""
    anyway: bool | None = None  # try a newer vLLM than those that were tested

    def open(self) -> Artifact:
        return Artifact.open(Path(self.artifact).expanduser())


def parse_options(additional_config: Any) -> Options:
    """Our options in vLLM's `additional_config`. Raises `RotationZooError` for none or others."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        problem = "vLLM was asked for rotationzoo's backend, and no artifact is named"
        raise RotationZooError(problem, SERVE)
    return strict_json.validate(Options, additional_config[KEY], f"additional_config.{KEY}")


def read_settings(config: Any) -> CacheSettings:
    """The settings of the cache that a `VllmConfig` asks for, read once in a process. Raises as
    `parse_options` and `check_model`."""
    options, model = parse_options(config.additional_config), config.model_config
    folder = _config_folder(model.model, model.revision)
    return _settings_of(options, model.model, folder, shares_blocks(model.hf_config))


def _config_folder(model: str, revision: str | None) -> Path:
    """The folder of the config that vLLM has read: the model's, or one in the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json", revision=revision)).parent


@functools.cache
def _settings_of(options: Options, name: str, folder: Path, has_others: bool) -> CacheSettings:
    # While vLLM builds a model, torch's defaults are the model's. vLLM may fork this process later,
    # and a child would wait forever for OpenMP threads of its parent.
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), one_thread():
            return make_settings(options, name, folder, has_others)
    finally:
        torch.set_default_dtype(dtype)


def make_settings(options: Options, name: str, folder: Path, has_others: bool) -> CacheSettings:
    """The settings that options make for the model of this name, whose config is in `folder`.
    `has_others`: what `shares_blocks` returns for it. Raises as `read_settings`."""
    artifact = options.open()
    check_model(artifact, name, folder)
    recipe = artifact.recipe
    budget = None if options.bits is None else Budget(options.bits)
    budget = caches.budget_beside_others(budget, recipe.budget, has_others)
    uncentered = find_engine("vllm").uncentered
    rotations = caches.reduce_rotations(artifact.rotations, uncentered, budget)
    chosen = CacheOptions(
        engine="vllm",
        format=options.format,
        bits=options.bits,
        sink=options.sink,
        recent=options.recent or max(1, recipe.recent),
    )
    return caches.complete_settings(recipe, rotations, chosen)


def check_model(artifact: Artifact, name: str, folder: Path) -> None:
    """Raise `RotationZooError` for an artifact of neither this model nor the one that it was
    quantized from, and `UnsupportedModel` if vLLM's pages cannot hold every layer."""
    check_sides("vllm", artifact.rotations.sides)
    made_for = artifact.manifest.model
    fitting = hash_config(folder), hash_config(folder, unquantized=True)
    if made_for.config_sha256 not in fitting:
        problem = f"{artifact.folder} was made for {made_for.id}, and not for {name}"
        hint = f"make one with: rotationzoo calibrate {name}"
        raise RotationZooError(problem, hint)
    geometry = artifact.geometry
    shared = [layer.index for layer in geometry if layer.owner != layer.index]
    shapes = {(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in geometry}
    if shared or len(shapes) > 1 or any(key != value for _, key, value in shapes):
        raise UnsupportedModel(
            f"the layers of {name} do not all cache keys and values of one shape, which "
            "vLLM's pages of one size need",
            hint=f"read it with transformers: rotationzoo generate {name}",
        )


def served_layers(settings: CacheSettings, config: Any) -> set[int]:
    """The layers of a `VllmConfig` that are stored in 2 bits: those with full attention."""
    full = full_attention_layers(config.model_config.hf_config)
    return {*settings.codec.rotations} if full is None else full


def verified_tokens(config: Any) -> int:
    """New tokens of a request in a decoding step: one, and those that were drafted."""
    return 1 + int(getattr(config.speculative_config, "num_speculative_tokens", 0))


def check_kernels(settings: CacheSettings, dtype: torch.dtype, head_size: int) -> None:
    """Raise `RotationZooError` if no kernel on this machine reads the pages on its GPU."""
    if not kernels_run_on(torch.device("cuda")):
        hint = f"install it with: {INSTALL}"
        raise RotationZooError("reading pages on this GPU needs NVIDIA's cuda.core", hint)
    codec, format = settings.codec, settings.layout.format
    has_latents = codec.rotations.cached is LATENTS
    for layer in codec.rotations:
        if has_latents:
            page = codec.page_layout(layer, LATENT, 64, format)
            if not cuda_latents.supports(page, head_size - page.dim, dtype):
                problem = f"no kernel reads latents of {page.dim} and {head_size - page.dim} "
                raise UnsupportedModel(f"{problem}channels in the format {format} with {dtype}")
            continue
        key, value = (codec.page_layout(layer, side, 64, format) for side in SIDES)
        if not cuda_attention.supports(key, value, dtype):
            how = "by transform coding"
            if isinstance(key, PageLayout):
                how = f"in {key.groups} groups"
            raise UnsupportedModel(
                f"no kernel reads heads of {key.dim} channels {how} with {dtype}"
            )


def select_heads(settings: CacheSettings, heads: slice) -> CacheSettings:
    """The settings of a process that holds these KV heads of each layer."""

    def select(_: int, __: str, rotation: Rotation) -> Rotation:
        # All KV heads may share one matrix.
        chosen = {
            name: tensor[heads]
            for name, tensor in vars(rotation).items()
            if tensor is not None and len(tensor) == len(rotation.clip)
        }
        return replace(rotation, **chosen)

    codec = replace(settings.codec, rotations=settings.codec.rotations.replace(select))
    return replace(settings, codec=codec)


def cell_bytes(
    settings: CacheSettings, head_size: int, layer: int, itemsize: int = 2, held: int | None = None
) -> int:
    """The bytes of a token in one KV head of a layer: its key and value with scales and offsets; or
    its latent, and exact elements of `itemsize` bytes up to the head size. If heads differ, it is
    the mean, rounded up, of the process of `held` heads (None: all) that takes most. Raises
    `RotationZooError` for a head size that is not that of the rotations or of the format."""
    codec, sizes = settings.codec, list[torch.Tensor]()
    has_latents = codec.rotations.cached is LATENTS
    for side in codec.rotations.cached.sides:
        page = codec.page_layout(layer, side, 0, settings.layout.format)
        beside = head_size - page.dim
        if beside < 0 or (beside and not has_latents):
            raise UnsupportedModel(
                f"the model has heads of {head_size}, and the rotations are for {page.dim}"
            )
        if isinstance(page, PageLayout):
            check_shape(page.dim, codec.group_size or page.dim, page.format)
        sizes.append(torch.tensor(page.row_bytes) + beside * itemsize)
    of_processes = torch.stack(sizes).sum(0).view(-1, held or len(sizes[0])).double().mean(-1)
    # A layer whose channels have no bits takes 0 bytes, which vLLM does not allow.
    return max(1, math.ceil(float(of_processes.max())))
