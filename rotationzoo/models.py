"""One causal language model: find it, look at its attention on `meta`, load it on one device or over many.

A model is first looked at as its config describes it, with no weights: which layers call attention, with what heads, and
what their cache stores. Everything that can be refused is refused there, before a weight is fetched.
"""

import hashlib
import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import errors as hub
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from rotationzoo.capture import capture, check_transparent, decoder
from rotationzoo.errors import ModelUnavailable, UnsupportedModel, UsageError

DEMO = Path(__file__).parent / "data" / "demo" / "model"
# Root files only: subfolders hold other formats of the same weights.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_NOT_FILES = ["*/*", "consolidated*"]
_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Source:
    """Where a model is: the name the user gave, the local folder of its files, and the hub commit (None for a folder)."""

    name: str
    folder: Path
    revision: str | None


@dataclass(frozen=True)
class Layer:
    """The attention of one layer. `owner` is the layer whose cache it reads: itself, or an earlier one that it shares."""

    index: int
    owner: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads


Geometry = list[Layer]


def cached_layers(geometry: Geometry) -> Geometry:
    """The layers that store keys and values of their own: those that get a rotation."""
    return [layer for layer in geometry if layer.owner == layer.index]


def geometry_json(geometry: Geometry) -> list[dict[str, int]]:
    return [asdict(layer) for layer in geometry]


# ---- finding


def find(model: str, revision: str | None = None) -> Source:
    """Locate a hub id, a local folder or `demo`, fetching no more than `config.json`. Raises `ModelUnavailable`."""
    folder = DEMO if model == "demo" else Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelUnavailable(
                f"{model} is no model: the folder has no config.json",
                hint="give the folder that save_pretrained wrote, a hub id such as Qwen/Qwen3-8B, or demo",
            )
        return Source(model, folder, None)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelUnavailable(f"there is no folder {model}", hint="check the path, or give a hub id such as Qwen/Qwen3-8B")
    with _hub_errors(model, revision):
        config = Path(huggingface_hub.hf_hub_download(model, "config.json", revision=revision))
    return Source(model, config.parent, config.parent.name)


def fetch(source: Source, weights: bool = True) -> None:
    """Make the tokenizer, and then the weights, of a found model local. Raises `ModelUnavailable`."""
    if source.revision is not None:
        skipped = _NOT_FILES if weights else [*_NOT_FILES, "*.safetensors"]
        with _hub_errors(source.name, source.revision):
            huggingface_hub.snapshot_download(
                source.name, revision=source.revision, allow_patterns=_FILES, ignore_patterns=skipped
            )
    if weights and not has_weights(source):
        raise ModelUnavailable(
            f"{source.name} has no complete safetensors weights",
            hint="convert it once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)",
        )


def has_weights(source: Source) -> bool:
    """Whether all weight files are on this machine."""
    return bool(_weight_files(source.folder))


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """The hub client's exceptions as one sentence each; subclasses come before their parents."""
    try:
        yield
    except hub.GatedRepoError as error:
        raise ModelUnavailable(
            f"{model} is gated and this machine has no access to it",
            hint=f"accept its terms on https://huggingface.co/{model}, then run: hf auth login",
        ) from error
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        raise ModelUnavailable(
            f"there is no model {model} on the hub, nor a folder of that name",
            hint="check the spelling; for a private model run: hf auth login",
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ModelUnavailable(
            f"{model} has no revision {revision}", hint="give a branch, a tag or a commit of the repository"
        ) from error
    except hub.LocalEntryNotFoundError as error:
        raise ModelUnavailable(
            f"the hub cannot be reached and {model} is not in the local cache",
            hint="check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local folder; demo needs no network",
        ) from error
    except hub.EntryNotFoundError as error:
        raise ModelUnavailable(
            f"{model} is no transformers model: it has no config.json", hint="give the repository of the original weights"
        ) from error
    except (hub.HfHubHTTPError, ConnectionError, TimeoutError) as error:
        raise ModelUnavailable(
            f"the hub did not deliver {model}: {str(error).splitlines()[0]}", hint="run the same command again"
        ) from error


def load_config(source: Source) -> PretrainedConfig:
    """The model's config. Raises `ModelUnavailable` if unreadable, `UnsupportedModel` for what is no causal decoder."""
    try:
        config = AutoConfig.from_pretrained(source.folder)
    except (OSError, ValueError, KeyError) as error:
        kind = _json(source.folder / "config.json").get("model_type")
        raise ModelUnavailable(
            f"transformers does not know the model type {kind!r} of {source.name}"
            if kind
            else f"{source.name} has no readable config.json with a model_type",
            hint="upgrade transformers; models that bring their own code are not supported",
        ) from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{source.name} is an encoder-decoder, not a causal language model", hint=_CAUSAL_HINT)
    _model_class(config, source.name)
    return config


_CAUSAL_HINT = "give a decoder-only model, such as Qwen/Qwen3-8B, or demo"


def _model_class(config: PretrainedConfig, name: str) -> Any:
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModel(f"{name} ({config.model_type}) is not a causal language model", hint=_CAUSAL_HINT)


# ---- looking


def on_meta(config: PretrainedConfig, name: str) -> PreTrainedModel:
    """The model as its config describes it, on `meta`: shapes without weights."""
    with torch.device("meta"):
        return _model_class(config, name).from_config(config).eval()


def geometry_on_meta(model: PreTrainedModel) -> Geometry | None:
    """The attention geometry of a model on `meta`, or None where its forward needs values (then look at real weights)."""
    tower = decoder(model)
    # The default experts loop over the tokens each expert got, which needs values; batched ones have the same shapes.
    if getattr(tower.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("batched_mm")
    try:
        return geometry_of(model)
    except (NotImplementedError, RuntimeError):
        return None


@torch.no_grad()
def geometry_of(model: PreTrainedModel, ids: torch.Tensor | None = None) -> Geometry:
    """Who calls attention, with what heads, and whether the cache stores what was captured.

    `ids` `[B, T]` defaults to a few zeros on the model's device. Raises `UnsupportedModel` with the reason.
    """
    name = type(model).__name__
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise UnsupportedModel(_latent(name), hint=_LATENT_HINT)
    tower = decoder(model)
    if ids is None:
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=model.device)
    calls: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    with capture(model, lambda layer, query, key, value, output: calls.update({layer: (query, key, value)})):
        cache = tower(input_ids=ids, use_cache=True).past_key_values
    if not calls:
        raise UnsupportedModel(
            f"{name} computes attention in code of its own, where no hook can read it",
            hint="only models that use transformers' attention interface can be calibrated",
        )
    acausal = [m for m in tower.modules() if hasattr(m, "layer_idx") and getattr(m, "is_causal", True) is False]
    if acausal:
        raise UnsupportedModel(f"{name} is an encoder: its tokens attend to later ones", hint=_CAUSAL_HINT)
    stored = _stored(cache)
    if unseen := sorted(stored.keys() - calls.keys()):
        raise UnsupportedModel(f"{name} caches keys in layers {unseen} that never called the attention interface")
    geometry = []
    for index, (query, key, value) in sorted(calls.items()):
        shapes = (_heads_and_dim(key), _heads_and_dim(value))
        # One tensor read as both keys and values is a latent too, although its shape is that of one head.
        if key is value or (index in stored and stored[index] != shapes):
            raise UnsupportedModel(_latent(name), hint=_LATENT_HINT)
        owner = index if index in stored else _owner(index, key, calls, stored.keys())
        if owner is None:
            raise UnsupportedModel(f"layer {index} of {name} attends to keys and values that no cache layer stores")
        geometry.append(Layer(index, owner, query.shape[1], *shapes[0], shapes[1][1]))
    return geometry


_LATENT_HINT = "nothing to do: a rotation per KV head does not fit such a cache"


def _latent(name: str) -> str:
    return f"{name} caches a compressed latent (MLA or alike), not the keys and values that its attention reads"


def _heads_and_dim(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.shape[1], tensor.shape[-1]


def _stored(cache: Any) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
    """Layer -> (heads, dim) of the keys and of the values that the cache holds; layers without any are absent."""
    stored = {}
    for index, layer in enumerate(getattr(cache, "layers", [])):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, torch.Tensor) and keys.ndim == 4 and isinstance(values, torch.Tensor):
            stored[index] = _heads_and_dim(keys), _heads_and_dim(values)
    return stored


def _owner(index: int, key: torch.Tensor, calls: dict[int, Any], stored: Any) -> int | None:
    """The latest earlier layer with a cache that was handed the very same keys."""
    for other in sorted((layer for layer in calls if layer < index and layer in stored), reverse=True):
        theirs = calls[other][1]
        same_values = not key.is_meta and key.shape == theirs.shape and torch.equal(key.cpu(), theirs.cpu())
        if key is theirs or same_values:
            return other
    return None


# ---- loading


def load(
    source: Source, config: PretrainedConfig, device: str, dtype: torch.dtype | str, placement: "Placement | None" = None
) -> PreTrainedModel:
    """The model with its weights, in eval mode, on one device or spread by accelerate. Raises `ModelUnavailable`."""
    options: dict[str, Any] = {"device_map": device}
    if placement is not None:
        options = {
            "device_map": placement.device_map,
            "max_memory": placement.max_memory,
            "offload_folder": placement.offload_folder,
        }
    try:
        model = _model_class(config, source.name).from_pretrained(source.folder, dtype=dtype, **options)
    except torch.OutOfMemoryError as error:
        raise ModelUnavailable(f"{source.name} does not fit the memory of {device}", hint="add: --device-map auto") from error
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelUnavailable(f"{source.name} could not be loaded: {_sentence(error)}") from error
    return model.eval()


@dataclass(frozen=True)
class Placement:
    """accelerate's device map, with memory limits per device and a scratch folder for weights kept on disk."""

    device_map: str
    max_memory: dict[int | str, str] | None
    offload_folder: str


@contextmanager
def placement(device_map: str | None, max_memory: str | None) -> Iterator[Placement | None]:
    """`--device-map` and `--max-memory 0=20GiB,cpu=60GiB` as a `Placement`; its scratch folder is gone afterwards."""
    if device_map is None:
        if max_memory is not None:
            raise UsageError("--max-memory needs a device map", hint="add: --device-map auto")
        yield None
        return
    limits: dict[int | str, str] = {}
    for part in filter(None, (max_memory or "").split(",")):
        device, _, amount = part.partition("=")
        if not device or not amount:
            raise UsageError(f"--max-memory has no amount in {part!r}", hint="write it as: --max-memory 0=20GiB,cpu=60GiB")
        limits[int(device) if device.isdigit() else device] = amount
    with tempfile.TemporaryDirectory(prefix="rotationzoo-offload-") as folder:
        yield Placement(device_map, limits or None, folder)


def check(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """`check_transparent` on a short batch of real tokens."""
    with torch.no_grad():
        check_transparent(model, ids)


# ---- identity and size


def config_hash(source: Source) -> str:
    """sha256 of `config.json` with sorted keys and without the library version that wrote it."""
    config = _json(source.folder / "config.json")
    config.pop("transformers_version", None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def weights_fingerprint(source: Source) -> str:
    """sha256 over name, dtype, shape and the first and last 256 bytes of every tensor, in name order.

    The same for every sharding of the same weights, read in seconds from any size of model. Training changes some end of
    nearly every tensor, so a fine-tune has another fingerprint.
    """
    tensors: dict[str, bytes] = {}
    for path in _weight_files(source.folder):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                sample = b""
                for position in (begin, max(begin, end - 256)):
                    file.seek(position)
                    sample += file.read(min(256, end - position))
                tensors[name] = f"{name} {entry['dtype']} {entry['shape']} ".encode() + sample
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


def weights_bytes(source: Source, model: PreTrainedModel) -> int:
    """Size of the weight files where they are local, else of the parameters on `meta` in the config's dtype."""
    files = _weight_files(source.folder)
    if files:
        return sum(path.stat().st_size for path in files)
    dtype = getattr(model.config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads: one, or the shards that the index names, all present."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_json(index).get("weight_map", {}).values())) if index.is_file() else ["model.safetensors"]
    files = [folder / name for name in names]
    return files if files and all(path.is_file() for path in files) else []


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _sentence(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
