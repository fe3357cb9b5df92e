"""Finds and fetches a model: a hub repository, a folder, a GGUF file or the demo."""

import atexit
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import huggingface_hub
from huggingface_hub import errors as client

from rotationzoo import errors
from rotationzoo.artifact.manifest import Model, hash_config
from rotationzoo.errors import ModelUnavailable, RotationZooError, UnsupportedModel, as_unavailable
from rotationzoo.model import files
from rotationzoo.model.files import GGUF, ORIGINAL, check_configs, check_count
from rotationzoo.network.huggingface_session import asking_huggingface, describe_failure, status_of
from rotationzoo.network.tokens import huggingface_token
from rotationzoo.progress import Progress, tell_growth
from rotationzoo.storage import folders, strict_json
from rotationzoo.storage.files import check_utf8, digest, read
from rotationzoo.words import nearest

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact

DEMO = Path(__file__).parents[1] / "data" / "demo" / "model"
# Only files at the root are fetched: subfolders hold other formats of the same weights.
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_FILES += ["README.md", "LICENSE*", "NOTICE*"]
_CARD_FRONT = re.compile(r"\s*---\s*\n(.*?)\n---", re.DOTALL)
_CONFIG = "config.json"
_NOT_FILES = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Source:
    """A model's name as given, its folder (or that of its GGUF file), and its hub commit."""

    name: str
    folder: Path
    revision: str | None

    @property
    def label(self) -> str:
        """The name to publish: without the path of a local folder, which is private."""
        is_folder = self.revision is None and self.name != "demo"
        return self.folder.resolve().name if is_folder else self.name

    @property
    def fetch_hint(self) -> str | None:
        """How to complete a model in the hub's cache; None for a folder."""
        command = f"hf download {self.name} --revision {self.revision}"
        return f"where the hub can be reached, run: {command}" if self.revision else None


def find(model: str, revision: str | None = None) -> Source:
    """Locate a model, fetching at most `config.json`. Raises `ModelUnavailable`."""
    folder = DEMO if model == "demo" else Path(os.path.expanduser(model))
    if folder.is_dir() or folder.is_file():
        check_utf8(folder)
        if revision is not None:
            problem = f"{model} is a model on this machine, which has no revision {revision!r}"
            hint = "leave out --revision, or give a hub id such as Qwen/Qwen3-8B"
            raise ModelUnavailable(problem, hint)
        if folder.is_file():
            return Source(model, _stand_in(folder, model), None)
        if not (folder / "config.json").is_file():
            hint = "give a saved model's folder, a GGUF file, an id such as Qwen/Qwen3-8B, or demo"
            raise ModelUnavailable(f"{model} is not a model: the folder has no config.json", hint)
        check_configs(folder, model)
        return Source(model, folder, None)
    # A path with a typo: a hub id has at most one slash.
    if model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1:
        kind = "file" if model.endswith(".gguf") else "folder"
        hint = "check the path, or give a hub id such as Qwen/Qwen3-8B"
        raise ModelUnavailable(f"there is no {kind} {model}{_alike(model)}", hint)
    with _hub_errors(model, revision):
        file = huggingface_hub.hf_hub_download(model, _CONFIG, revision=revision)
    # The hub's cache names a snapshot's folder after its commit.
    folder = Path(file).parent
    check_configs(folder, model)
    return Source(model, folder, folder.name)


@cache
def _stand_in(file: Path, name: str) -> Path:
    """A temporary folder with the config of a GGUF file and a link to it. Raises `RotationZooError`
    if transformers cannot read it, or would drop RoPE settings."""
    import torch
    from transformers import AutoConfig

    from rotationzoo.recipe.rope import scaling_of
    from rotationzoo.storage.gguf_reader import open_gguf, write_header

    reader, other = open_gguf(file, lists=False), ORIGINAL
    for key in reader.fields:
        if key.endswith(("block_count", "_layers")) and isinstance(value := reader.value(key), int):
            check_count(value, name)
    folder = Path(mkdtemp(prefix="rotationzoo-"), file.name)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    folder.mkdir()
    (folder / GGUF).symlink_to(file.resolve())
    with as_unavailable(f"transformers cannot read the config in {name}", hint=other):
        write_header(reader, folder.with_name(GGUF))
        config = AutoConfig.from_pretrained(folder.parent, gguf_file=GGUF)
        # The default of transformers would be float32.
        config.dtype = torch.bfloat16
        _with_metadata(config, reader, name).save_pretrained(folder)
    check_configs(folder, name)
    scaling = reader.value(f"{reader.value('general.architecture')}.rope.scaling.type")
    scaled = scaling not in (None, "none")
    scaled |= any(tensor.name.startswith("rope_") for tensor in reader.tensors)
    if scaled and not scaling_of(config):
        problem = f"{name} scales RoPE, which transformers does not read from a GGUF file"
        raise UnsupportedModel(problem, other)
    return folder


@cache
def _write_tokenizer(folder: Path, name: str) -> None:
    """Write a GGUF file's tokenizer to the folder that stands for it. Raises `ModelUnavailable`."""
    from transformers import AutoTokenizer

    with as_unavailable(f"transformers cannot read the tokenizer in {name}", hint=ORIGINAL):
        AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(folder)


def _with_metadata(config: Any, reader: Any, name: str) -> Any:
    """The config with a GGUF file's RoPE, heads and windows. Raises `UnsupportedModel`."""
    kind, table = reader.value("general.architecture"), config.to_dict()
    rows = [int(each.shape[-1]) for each in reader.tensors if each.name == "token_embd.weight"]
    table["vocab_size"] = rows[0] if rows else table["vocab_size"]
    rope = table.get("rope_parameters") or {}
    full, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    types = table.get("layer_types", ["sliding_attention"])
    has_window = table.get("use_sliding_window", True) and "sliding_attention" in types
    own = table.get("head_dim") or config.hidden_size // getattr(config, "num_attention_heads", 1)
    dim = reader.value(f"{kind}.attention.key_length") or own
    for key, place, entry, held in (
        ("attention.key_length", table, "head_dim", own),
        ("attention.value_length", {}, "", dim),
        ("attention.sliding_window", table if has_window else {}, "sliding_window", 0),
        ("rope.freq_base", full, "rope_theta", None),
        ("rope.freq_base_swa", local, "rope_theta", full.get("rope_theta")),
        ("rope.dimension_count", full, "partial_rotary_factor", dim),
    ):
        value = reader.value(f"{kind}.{key}")
        if entry in place and value is not None:
            place[entry] = value / dim if "rotary" in entry else value or None
        elif value not in (None, held):
            lacks = "the config of transformers has no such field"
            raise UnsupportedModel(f"{name} has {kind}.{key} {value}, and {lacks}", ORIGINAL)
    return type(config).from_dict(table)


def find_cached(model: str, revision: str | None) -> Source | None:
    """A model in the hub's cache, if it is there. Nothing is fetched."""
    config = None
    with suppress(ValueError):  # not a hub id
        config = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
    return Source(model, Path(config).parent, revision) if isinstance(config, str) else None


def fetch(source: Source, weights: bool = True) -> None:
    """Fetch a model's missing files, without or with `weights`. Raises `ModelUnavailable`."""
    if files.is_gguf(source.folder):
        _write_tokenizer(source.folder, source.name)
    elif source.revision is not None:
        skipped = _NOT_FILES if weights else [*_NOT_FILES, "*.safetensors"]
        kinds: dict[str, Any] = {"allow_patterns": _FILES, "ignore_patterns": skipped}
        with _hub_errors(source.name, source.revision):
            huggingface_hub.snapshot_download(source.name, revision=source.revision, **kinds)
        check_configs(source.folder, source.name)
    if not weights or has_weights(source):
        return
    if absent := files.absent_weights(source.folder):
        file, reason = absent
        problem = f"the weights of {source.name} are not complete: they lack {file}, {reason}"
        hint = source.fetch_hint or f"copy {file} there, from where these files were written"
        raise ModelUnavailable(problem, hint)
    convert = "convert it once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)"
    hint = f"{source.fetch_hint}; or {convert}" if source.revision else convert
    raise ModelUnavailable(f"{source.name} has no complete safetensors weights", hint=hint)


def has_weights(source: Source) -> bool:
    """Whether all weight files are on this machine."""
    return bool(files.weight_files(source.folder))


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    huggingface_token()  # raises for a malformed token
    try:
        with asking_huggingface():
            yield
    except RotationZooError:
        raise
    # The client's transport, its cache folder and a full disk may raise anything.
    except Exception as error:
        if isinstance(error, client.LocalEntryNotFoundError):
            failure = describe_failure(error.__cause__)
            raise _not_cached(model, revision or "main", failure) from error
        raise ModelUnavailable(*_explain(error, model, revision)) from error


def _explain(error: Exception, model: str, revision: str | None) -> tuple[str, str]:
    """The problem and a hint for the hub client's exception. Subclasses come before parents."""
    match error:
        case client.GatedRepoError():
            hint = f"accept its terms on https://huggingface.co/{model}, then run: hf auth login"
            return f"{model} is gated and this machine has no access to it", hint
        case client.RepositoryNotFoundError() | client.HFValidationError():
            says = f"there is no model {model} on the hub, nor a folder of that name{_alike(model)}"
            return says, "check the spelling; for a private model run: hf auth login"
        case client.RevisionNotFoundError():
            hint = "give a branch, a tag or a commit of the repository"
            return f"{model} has no revision {revision}", hint
        case client.EntryNotFoundError():
            says = f"{model} is not a transformers model: it has no config.json"
            hint = "give the repository of the original weights, or the path of a GGUF file"
            return says, hint
    hint = "check the network and the disk of HF_HOME, then run the same command again"
    if status_of(error) in (401, 403):
        hint = "run: hf auth login"
    return f"{model} could not be fetched: {errors.first_sentence(error)}", hint


def _not_cached(model: str, revision: str, what: str) -> ModelUnavailable:
    """The error for files that are not in the hub's cache if the hub fails with `what`."""
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    configs = (cache / "snapshots").glob("[0-9a-f]" * 40 + "/config.json")
    commits = [config.parent.name for config in configs]
    message = f"{what}, and {model} is neither in the hub's cache here nor a folder{_alike(model)}"
    hint = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a local folder or demo"
    if (cache / "snapshots" / revision).is_dir():
        message = f"{what}, and not all files of {model} at {revision} are in the hub's cache here"
    elif commits:
        others = " and ".join(commits)
        message = f"{what}, and the hub's cache here has {model} not at {revision}, but at {others}"
        hint = f"add: --revision {commits[0]}"
    return ModelUnavailable(message, hint=hint)


def _alike(model: str) -> str:
    """A folder that was probably meant, as the end of an error message."""
    path = Path(os.path.expanduser(model))
    others = [other.name for other in path.parent.glob("*") if other.is_dir()]
    # Names are compared, because two paths in one folder are always similar.
    return nearest(path.name, others, model.rstrip("/").removesuffix(path.name))


def license_of(source: Source) -> str | None:
    """The license in the model's own card, if any."""
    card = source.folder / "README.md"
    if not card.is_file():  # not `exists`: reading a pipe would block
        return None
    metadata = None
    with suppress(OSError, ValueError), card.open(encoding="utf-8") as file:
        if block := _CARD_FRONT.match(file.read(strict_json.YAML_LIMIT)):
            metadata = strict_json.parse_yaml(block[1])
    license_name = metadata.get("license") if isinstance(metadata, dict) else None
    return license_name if isinstance(license_name, str) else None


def weights_fingerprint(source: Source) -> str:
    """sha256 over every tensor's name, dtype, shape and both ends, for any sharding; empty without
    weights. A fine-tuned model has another fingerprint, since training changes most ends."""
    tensors = files.tensor_ends(files.weight_files(source.folder))
    ends = b"".join(tensors[name] for name in sorted(tensors))
    return digest(ends) if ends else ""


def fetch_weights(source: Source, progress: Progress) -> None:
    """Fetch a model's weights unless they are on this machine. Raises `ModelUnavailable`."""
    stage, total = "fetching the weights", files.indexed_bytes(source.folder)
    if source.revision is None or total is None or has_weights(source):
        progress(stage, 0, 0)
        fetch(source)
        return
    snapshot, blobs = source.folder, source.folder.parent.parent / "blobs"

    def find() -> Iterator[Path]:
        return chain(snapshot.glob("*.safetensors"), blobs.glob("*.incomplete"))

    with tell_growth(find, stage, total, progress):
        fetch(source)


# ---- the model that an artifact was made for


_FAILURES = RotationZooError, OSError, RuntimeError, ValueError


def model_words(artifact: "Artifact") -> list[str]:
    """The model's name in commands, with any revision; `MODEL` if a local one is not found."""
    model = artifact.manifest.model
    if model.revision:
        return [model.id, "--revision", model.revision]
    return [_locate(model)[0]]


def find_model(artifact: "Artifact") -> Path | None:
    """The path of the artifact's model: the demo, its name here, or its last known path."""
    return _locate(artifact.manifest.model)[1]


def remember_model(model: Model, path: str) -> None:
    """Remember the path of a local model. Errors of the disk are ignored."""
    with suppress(*_FAILURES):
        if (given := Path.cwd() / Path(path).expanduser()).exists():
            folders.replace_file(_place(model), str(given).encode())


def _locate(model: Model) -> tuple[str, Path | None]:
    """A model's name in commands, as the user gave it if it is still there, and its path."""
    here, paths = Path.cwd(), [Path(model.id)]
    with suppress(*_FAILURES):
        paths.append(Path(read(_place(model), 1 << 14).decode()))
    for path in paths:
        folder = DEMO if str(path) == "demo" else here / path
        with suppress(*_FAILURES):  # the folder may have no config
            is_gguf = folder.is_file() and folder.name == model.id
            if is_gguf or hash_config(folder) == model.config_sha256:
                return str(path.relative_to(here) if path.is_relative_to(here) else path), folder
    return "MODEL", None


def _place(model: Model) -> Path:
    known = model.weights_fingerprint or model.config_sha256
    return folders.state_folder() / "models" / known
