"""The settings of a server's cache: what vLLM's `additional_config` names under `rotationzoo`, read
from the artifact and compared with the model."""

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec import cuda_attention
from rotationzoo.codec.cuda import INSTALL
from rotationzoo.codec.cuda_encoder import kernels_run_on
from rotationzoo.codec.engines import check_sides, find_engine
from rotationzoo.codec.int2 import check_shape
from rotationzoo.codec.reduction import budget_beside_windows, reduce_rotations
from rotationzoo.codec.settings import (
    CacheOptions,
    CacheSettings,
    Rounding,
    as_engine,
    complete_settings,
)
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import full_attention_layers
from rotationzoo.rotations import SIDES, Rotation
from rotationzoo.storage import strict_json
from rotationzoo.vllm import BACKENDS, KEY, WORKER
from rotationzoo.vllm.steps import count_slots
from rotationzoo.words import byte_count


class Options(strict_json.Strict, extra="forbid"):
    """The settings under `KEY`."""

    artifact: str
    """The folder of the artifact."""
    format: Literal["sglang", "vllm", "fine"] | None = None
    """By default `fine` where the artifact has a budget of bits, and else `vllm`."""
    bits: float | None = None
    """Another budget of bits an element than the artifact's, which must have one."""
    rounding: Rounding | None = None
    """By default `feedback` where the artifact has its factors."""
    sink: int | None = Field(default=None, ge=0)
    recent: int | None = Field(default=None, ge=1)
    """First and last tokens that stay exact; by default the recipe's. A new token reads itself
    exact."""


def parse_options(additional_config: Any) -> Options | None:
    """The options among vLLM's `additional_config`; None if there are none. Raises
    `RotationZooError` for anything that is no option."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    return strict_json.validate(Options, additional_config[KEY], f"additional_config.{KEY}")


def read_settings(config: Any) -> CacheSettings | None:
    """The settings of the cache that a `VllmConfig` asks for; None if it names no artifact.

    Raises `RotationZooError` for an artifact of another model, and `UnsupportedModel` for what this
    backend cannot serve. Nothing is read twice in a process.
    """
    options = parse_options(config.additional_config)
    if options is None:
        return None
    model = config.model_config
    folder = _config_folder(model.model, model.revision)
    has_windows = full_attention_layers(model.hf_config) is not None
    return _settings_of(options.model_dump_json(), model.model, folder, has_windows)


def _config_folder(model: str, revision: str | None) -> Path:
    """The folder of the config that vLLM has read: a model's own, or one of the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json", revision=revision)).parent


@functools.cache
def _settings_of(options: str, name: str, folder: Path, has_windows: bool) -> CacheSettings:
    # vLLM builds a model with its own device and dtype as torch's defaults.
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return make_settings(Options(**json.loads(options)), name, folder, has_windows)
    finally:
        torch.set_default_dtype(dtype)


def make_settings(options: Options, name: str, folder: Path, has_windows: bool) -> CacheSettings:
    """The settings that options make for the model of this name, whose config is in the folder.
    `has_windows`: whether layers of it have a sliding window. Raises as `read_settings`."""
    artifact = Artifact.open(Path(options.artifact).expanduser())
    check_model(artifact, name, folder)
    recipe = artifact.recipe
    asked: Any = options.model_dump(exclude={"artifact"}, exclude_none=True)
    budget = None if options.bits is None else Budget(options.bits)
    budget = budget_beside_windows(budget, artifact.rotations.has_budget, has_windows)
    uncentered = find_engine("vllm").uncentered
    rotations = reduce_rotations(artifact.rotations, recipe.group_size, uncentered, budget)
    chosen: CacheOptions = {"engine": "vllm", "recent": max(1, recipe.recent)}
    chosen = as_engine(chosen | asked, rotations.has_budget)
    return complete_settings(recipe, rotations, chosen)


def check_model(artifact: Artifact, name: str, folder: Path) -> None:
    """Raise `RotationZooError` for an artifact of another model, and `UnsupportedModel` for a model
    of which vLLM's pages cannot hold every layer, or that runs with scaled RoPE."""
    check_sides("vllm", artifact.rotations.sides)
    made_for = artifact.manifest.model
    if not artifact.bound or made_for.config_sha256 != hash_config(folder):
        raise RotationZooError(
            f"{artifact.folder} was made for {made_for.id}, and not for {name}",
            hint=f"make one with: rotationzoo calibrate {name}",
        )
    if scaling := artifact.recipe.rope_scaling:
        raise UnsupportedModel(
            f"{artifact.folder} was calibrated with the rope scaling {scaling}, which this backend "
            "does not compare with the server's",
            hint=f"make one without: rotationzoo calibrate {name}",
        )
    geometry = artifact.geometry
    shared = [layer.index for layer in geometry if layer.owner != layer.index]
    shapes = {(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in geometry}
    if shared or len(shapes) > 1 or any(key != value for _, key, value in shapes):
        raise UnsupportedModel(
            f"the layers of {name} do not all cache keys and values of one shape, which "
            "vLLM's pages of one size need",
            hint=f"read it with transformers: rotationzoo generate {name}",
        )


def check_server(config: Any) -> None:
    """Raise `UnsupportedModel` for what vLLM is asked for, and this backend does not serve."""
    from vllm.envs import VLLM_PLUGINS
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    attention, place, known = config.attention_config, Backends.CUSTOM, {Backends.CUSTOM}
    if config.device_config.device_type == "cpu":  # which has one backend, whatever it is asked for
        place, known = Backends.CPU_ATTN, {None, Backends.CPU_ATTN, Backends.CUSTOM}
    backend = attention.backend_per_kind.get("full_attention", attention.backend)
    # CUSTOM has no path as long as no plugin gave it one.
    path = place.get_path() if place.is_overridden() else BACKENDS
    heads = model.get_total_num_kv_heads()
    changed = ", ".join(_changed_keys(model))
    unserved = {
        "processes that share KV heads": heads % parallel.tensor_parallel_size,
        "microbatches": parallel.use_ubatching,
        # It fills pages that this backend has not written.
        "a KV connector": config.kv_transfer_config is not None,
        "KV offloading": cache.kv_offloading_size is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "speculative decoding": config.speculative_config is not None,
        "a KV cache dtype of vLLM's own": cache.cache_dtype not in ("auto", "bfloat16"),
        "layers left out": getattr(cache, "kv_cache_dtype_skip_layers", None),
        "random weights (--load-format dummy)": config.load_config.load_format == "dummy",
        "weights that change meanwhile": config.weight_transfer_config is not None,
        f"another config than the model's own ({changed})": changed,
        "another worker of vLLM": not parallel.worker_cls.startswith(("vllm.v1.worker.", WORKER)),
        "another attention backend than CUSTOM": backend not in known,
        f"{path}, which another plugin put in our backend's place": not path.startswith(BACKENDS),
        "a VLLM_PLUGINS that leaves rotationzoo out": KEY not in (VLLM_PLUGINS or [KEY]),
    }
    for what, asked in unserved.items():
        if asked:
            raise UnsupportedModel(f"rotations are not served with {what}", hint="leave it out")


def _changed_keys(model: Any) -> list[str]:
    """What vLLM's options change in the config that a model comes with."""
    if not (model.hf_overrides or model.hf_config_path):
        return []
    from vllm.transformers_utils.config import get_config

    # vLLM completes both in the same way.
    read = get_config(model.model, model.trust_remote_code, model.revision, model.code_revision)
    kept, used = read.to_dict(), model.hf_config.to_dict()
    return [key for key in kept | used if kept.get(key) != used.get(key) and key != "_name_or_path"]


def served_layers(settings: CacheSettings, config: Any) -> set[int]:
    """The layers of a `VllmConfig` that are stored in 2 bits: those with full attention."""
    full = full_attention_layers(config.model_config.hf_config)
    return {*settings.codec.rotations} if full is None else full


def describe(settings: CacheSettings, config: Any) -> list[str]:
    """What people should know of a server."""
    codec, layout, requests = settings.codec, settings.layout, config.scheduler_config.max_num_seqs
    layers, tokens = served_layers(settings, config), 64
    if not layers:
        return ["Every layer has a sliding window, which vLLM keeps exact: nothing has 2 bits"]
    pages = [codec.page_layout(*each, tokens, layout.format) for each in product(layers, SIDES)]
    elements = count_slots(layout, tokens, requests) * sum(each.heads * each.dim for each in pages)
    copies = byte_count(tokens * elements * config.model_config.dtype.itemsize)
    notes = [
        f"Serving codes written by {codec.rounding} rounding, the first {layout.sink} and the last "
        f"{layout.recent} tokens exact, which takes {copies} for {requests} requests at a time "
        "(--max-num-seqs)"
    ]
    if config.lora_config is not None:
        notes.append("Rotations were made without the adapters of --enable-lora, which change keys")
    return notes


def check_kernels(settings: CacheSettings, dtype: torch.dtype) -> None:
    """Raise `RotationZooError` where this machine has no kernel that reads the pages on its GPU."""
    if not kernels_run_on(torch.device("cuda")):
        raise RotationZooError(
            "reading pages on this GPU needs NVIDIA's cuda.core", hint=f"install it with: {INSTALL}"
        )
    codec, format = settings.codec, settings.layout.format
    for layer in codec.rotations:
        key, value = (codec.page_layout(layer, side, 64, format) for side in SIDES)
        if not cuda_attention.supports(key, value, dtype):
            raise UnsupportedModel(
                f"no kernel reads heads of {key.dim} channels in {key.groups} groups with {dtype}"
            )


def select_heads(settings: CacheSettings, heads: slice) -> CacheSettings:
    """The settings of a process that holds these KV heads of each layer."""

    def select(_: int, __: str, rotation: Rotation) -> Rotation:
        names = ("matrix", "clip", "eigenvalues", "mean", "feedback", "whitening")
        tensors = {name: getattr(rotation, name) for name in names}
        # All KV heads may share one matrix.
        chosen = {
            name: tensor[heads]
            for name, tensor in tensors.items()
            if tensor is not None and len(tensor) == len(rotation.clip)
        }
        return replace(rotation, **chosen)

    codec = replace(settings.codec, rotations=settings.codec.rotations.replace(select))
    return replace(settings, codec=codec)


def cell_bytes(settings: CacheSettings, head_size: int, layer: int | None = None) -> int:
    """The bytes of one token of one KV head of a layer: codes, scale and offset of its key and its
    value. Without a layer, those of all layers. Raises `UnsupportedModel` for another head size
    than the rotations', and `RotationZooError` for one that the format cannot store, and where no
    layer is given and their bytes differ."""
    codec, format, tokens = settings.codec, settings.layout.format, 64
    sizes = dict.fromkeys(codec.rotations if layer is None else [layer], 0)
    for number, side in product(sizes, SIDES):
        page = codec.page_layout(number, side, tokens, format)
        if page.dim != head_size:
            raise UnsupportedModel(
                f"the model has heads of {head_size}, and the rotations are for {page.dim}"
            )
        check_shape(head_size, codec.group_size or head_size, page.format)
        sizes[number] += page.bytes // (page.heads * tokens)
    if len({*sizes.values()}) > 1:
        raise RotationZooError(
            "layers take different bytes, and vLLM did not say which one it asks for",
            hint="leave the budget of bits out: --format vllm",
        )
    return max(sizes.values())
