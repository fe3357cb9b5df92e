"""Where a model is: a hub repository, a local folder or the demo; its files, and what tells one
model from another."""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub import errors as hub

from rotationzoo.errors import ModelUnavailable, RotationZooError, as_unavailable, first_sentence
from rotationzoo.network.huggingface_session import asking_huggingface
from rotationzoo.network.tokens import huggingface_token
from rotationzoo.storage import files

DEMO = Path(__file__).parents[1] / "data" / "demo" / "model"
# Root files only: subfolders hold other formats of the same weights.
_FILES = [
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "*.json",
    "*.safetensors",
    "*.model",
    "*.txt",
    "*.jinja",
]
_NOT_FILES = ["*/*", "consolidated*"]
_JSON_LIMIT = 256 << 20  # bytes: the index of a model of experts has a line for each tensor


@dataclass(frozen=True)
class Source:
    """Where a model is: the name the user gave, the local folder of its files, and the hub commit
    (None for a folder)."""

    name: str
    folder: Path
    revision: str | None

    @property
    def label(self) -> str:
        """The name to publish: where a folder is on this machine is nobody's business."""
        return (
            self.name
            if self.revision is not None or self.name == "demo"
            else self.folder.resolve().name
        )


def find(model: str, revision: str | None = None) -> Source:
    """Locate a hub id, a local folder or `demo`, fetching no more than `config.json`. Raises
    `ModelUnavailable`."""
    folder = DEMO if model == "demo" else Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelUnavailable(
                f"{model} is no model: the folder has no config.json",
                hint="give the folder that save_pretrained wrote, a hub id such as Qwen/Qwen3-8B, or demo",
            )
        return Source(model, folder, None)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelUnavailable(
            f"there is no folder {model}",
            hint="check the path, or give a hub id such as Qwen/Qwen3-8B",
        )
    with _hub_errors(model, revision):
        config = Path(huggingface_hub.hf_hub_download(model, "config.json", revision=revision))
    return Source(model, config.parent, config.parent.name)


def fetch(source: Source, weights: bool = True) -> None:
    """Make the tokenizer, and then the weights, of a found model local. Raises
    `ModelUnavailable`."""
    if source.revision is not None:
        skipped = _NOT_FILES if weights else [*_NOT_FILES, "*.safetensors"]
        with _hub_errors(source.name, source.revision):
            huggingface_hub.snapshot_download(
                source.name,
                revision=source.revision,
                allow_patterns=_FILES,
                ignore_patterns=skipped,
            )
    if weights and not has_weights(source):
        raise ModelUnavailable(
            f"{source.name} has no complete safetensors weights",
            hint="convert it once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)",
        )


def has_weights(source: Source) -> bool:
    """Whether all weight files are on this machine."""
    return bool(weight_files(source.folder))


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """The hub client's exceptions as one sentence each; subclasses come before their parents."""
    huggingface_token()
    try:
        with asking_huggingface():
            yield
    except RotationZooError:
        raise
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
            f"{model} has no revision {revision}",
            hint="give a branch, a tag or a commit of the repository",
        ) from error
    except hub.LocalEntryNotFoundError as error:
        answer = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        what = "cannot be reached" if answer is None else f"answered {answer}"
        raise ModelUnavailable(
            f"the hub {what} and {model} is not in the local cache",
            hint="check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local folder; demo needs no network",
        ) from error
    except hub.EntryNotFoundError as error:
        raise ModelUnavailable(
            f"{model} is no transformers model: it has no config.json",
            hint="give the repository of the original weights",
        ) from error
    except (
        Exception
    ) as error:  # what the client's own transport, its cache folder or a full disk raise
        denied = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        raise ModelUnavailable(
            f"{model} could not be fetched: {first_sentence(error)}",
            hint="run: hf auth login"
            if denied
            else "check the network and the disk of HF_HOME, then run the same command again",
        ) from error


def config_hash(source: Source) -> str:
    """sha256 of `config.json` with sorted keys and without the library version that wrote it."""
    config = read_json(source.folder / "config.json")
    config.pop("transformers_version", None)
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def license_of(source: Source) -> str | None:
    """The license that the model's own card names, if it has one."""
    card = source.folder / "README.md"
    if not card.is_file():  # a pipe would be waited for
        return None
    try:
        metadata = huggingface_hub.metadata_load(card)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    found = (metadata or {}).get("license")
    return found if isinstance(found, str) else None


def weights_fingerprint(source: Source) -> str:
    """sha256 over name, dtype, shape and the first and last 256 bytes of every tensor, in name
    order.

    The same for every sharding of the same weights, read in seconds from any size of model.
    Training changes some end of nearly every tensor, so a fine-tune has another fingerprint.
    """
    tensors: dict[str, bytes] = {}
    for path in weight_files(source.folder):
        with as_unavailable(f"{path} is no safetensors file", hint="fetch the weights again"):
            tensors |= _tensor_ends(path)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


def _tensor_ends(path: Path) -> dict[str, bytes]:
    """Name -> name, type, shape and both ends of the data of each tensor in a safetensors file."""
    ends = {}
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError("its header is longer than the file")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            sample = b""
            for position in (begin, max(begin, end - 256)):
                file.seek(position)
                sample += file.read(min(256, end - position))
            ends[name] = f"{name} {entry['dtype']} {entry['shape']} ".encode() + sample
    return ends


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads: one, or the shards that the index names,
    all present. Raises `ModelUnavailable` for an index that names anything but files of the
    folder."""
    index = folder / "model.safetensors.index.json"
    names = _shards(index) if index.is_file() else ["model.safetensors"]
    paths = [folder / name for name in names]
    return paths if paths and all(path.is_file() for path in paths) else []


def _shards(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    try:
        return sorted({files.plain(str(name)) for name in names})
    except ValueError as error:
        raise ModelUnavailable(
            f"{index} is damaged: {error}", hint="fetch the weights again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A table in a file of a model, or an empty one where there is none. The file may be a link, as
    in the hub's cache."""
    try:
        content = json.loads(files.read(Path(os.path.realpath(path)), _JSON_LIMIT))
    except (RotationZooError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
