"""The source of a model: a hub repository, a folder or the demo; how it is identified, and how its
weights are fetched, which may take hours.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from rotationzoo.errors import (
    ModelUnavailable,
    RotationZooError,
    first_sentence,
)
from rotationzoo.model.files import (
    absent_weights,
    check_configs,
    indexed_bytes,
    tensor_ends,
    weight_files,
)
from rotationzoo.network.huggingface_session import asking_huggingface, describe_failure, status_of
from rotationzoo.network.tokens import huggingface_token
from rotationzoo.progress import Progress, size_of_all, tell_growth
from rotationzoo.storage import strict_yaml
from rotationzoo.words import nearest

DEMO = Path(__file__).parents[1] / "data" / "demo" / "model"
# Only files at the root are fetched: subfolders hold other formats of the same weights.
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
_CARD_FRONT = re.compile(r"\s*---\s*\n(.*?)\n---", re.DOTALL)
_NOT_FILES = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Source:
    """Where a model comes from: the name that the user gave, the local folder of its files, and the
    hub commit (None for a folder)."""

    name: str
    folder: Path
    revision: str | None
    model: Any = field(default=None, repr=False, compare=False)
    tokenizer: Any = field(default=None, repr=False, compare=False)
    """What the caller loaded, and is neither fetched nor read from the folder; None otherwise."""

    @property
    def label(self) -> str:
        """The name to publish. For a local folder it is only the folder's name, because its path is
        private."""
        is_folder = self.revision is None and self.name != "demo"
        return self.folder.resolve().name if is_folder else self.name

    @property
    def fetch_hint(self) -> str | None:
        """How to complete a model in the hub's cache; None for a folder."""
        command = f"hf download {self.name} --revision {self.revision}"
        return f"where the hub can be reached, run: {command}" if self.revision else None


def is_local(model: str) -> bool:
    """Whether this is `demo` or a folder, which may be missing: a hub id has at most one slash."""
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    return is_path or model == "demo" or Path(model).exists()


def find(model: str, revision: str | None = None) -> Source:
    """Locate a hub id, a local folder or `demo`. Fetches at most `config.json`. Raises
    `ModelUnavailable`, also for a revision of what is on this machine."""
    folder = DEMO if model == "demo" else Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelUnavailable(
                f"{model} is a model on this machine, which has no revision {revision!r}",
                hint="leave out --revision, or give a hub id such as Qwen/Qwen3-8B",
            )
        if not (folder / "config.json").is_file():
            raise ModelUnavailable(
                f"{model} is no model: the folder has no config.json",
                hint="give the folder that save_pretrained wrote, a hub id such as Qwen/Qwen3-8B, "
                "or demo",
            )
        check_configs(folder, model)
        return Source(model, folder, None)
    if is_local(model):  # a mistyped path
        raise ModelUnavailable(
            f"there is no folder {model}{_alike(model)}",
            hint="check the path, or give a hub id such as Qwen/Qwen3-8B",
        )
    with _hub_errors(model, revision):
        folder = Path(
            huggingface_hub.hf_hub_download(model, "config.json", revision=revision)
        ).parent
    check_configs(folder, model)
    # The hub's cache names a snapshot's folder after its commit.
    return Source(model, folder, folder.name)


def find_cached(model: str, revision: str | None) -> Source | None:
    """A model in the hub's cache, if it is there. Nothing is fetched."""
    config = None
    with suppress(ValueError):  # no hub id
        config = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
    return Source(model, Path(config).parent, revision) if isinstance(config, str) else None


def fetch(source: Source, weights: bool = True) -> None:
    """Fetch a model's tokenizer and, if `weights` is set, its weights, unless they are on this
    machine or loaded. Raises `ModelUnavailable`."""
    if source.model is not None:
        return
    if source.revision is not None:
        skipped = _NOT_FILES if weights else [*_NOT_FILES, "*.safetensors"]
        with _hub_errors(source.name, source.revision):
            huggingface_hub.snapshot_download(
                source.name,
                revision=source.revision,
                allow_patterns=_FILES,
                ignore_patterns=skipped,
            )
        check_configs(source.folder, source.name)
    if not weights or has_weights(source):
        return
    if absent := absent_weights(source.folder):
        file, reason = absent
        raise ModelUnavailable(
            f"the weights of {source.name} are not complete: they lack {file}, {reason}",
            hint=source.fetch_hint or f"copy {file} there, from where these files were written",
        )
    convert = "convert it once: AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)"
    hint = f"{source.fetch_hint}; or {convert}" if source.revision else convert
    raise ModelUnavailable(f"{source.name} has no complete safetensors weights", hint=hint)


def has_weights(source: Source) -> bool:
    """Whether all weight files are on this machine."""
    return bool(weight_files(source.folder))


@contextmanager
def _hub_errors(model: str, revision: str | None) -> Iterator[None]:
    """Turn the hub client's exceptions into one sentence each. Subclasses are caught before their
    parents."""
    huggingface_token()  # raises before any request for a token that cannot be sent
    try:
        with asking_huggingface() as use:
            yield
    except RotationZooError:
        raise
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{model} is gated and this machine has no access to it",
            hint=f"accept its terms on https://huggingface.co/{model}, then run: hf auth login",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelUnavailable(
            f"there is no model {model} on the hub, nor a folder of that name{_alike(model)}",
            hint="check the spelling; for a private model run: hf auth login",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelUnavailable(
            f"{model} has no revision {revision}",
            hint="give a branch, a tag or a commit of the repository",
        ) from error
    except LocalEntryNotFoundError as error:
        failure = describe_failure(error.__cause__, use.answer)
        raise _not_cached(model, revision or "main", failure) from error
    except EntryNotFoundError as error:
        raise ModelUnavailable(
            f"{model} is no transformers model: it has no config.json",
            hint="give the repository of the original weights",
        ) from error
    # Anything that the client's transport, its cache folder or a full disk may raise.
    except Exception as error:
        hint = "check the network and the disk of HF_HOME, then run the same command again"
        if status_of(error) in (401, 403):
            hint = "run: hf auth login"
        raise ModelUnavailable(
            f"{model} could not be fetched: {first_sentence(error)}", hint=hint
        ) from error


def _not_cached(model: str, revision: str, what: str) -> ModelUnavailable:
    """The error for files that the hub does not give, which `what` says, and its cache lacks."""
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
    path = Path(model).expanduser()
    folders = [other.name for other in path.parent.glob("*") if other.is_dir()]
    # Names alone are compared: two paths of one folder are always alike.
    return nearest(path.name, folders, model.rstrip("/").removesuffix(path.name))


def license_of(source: Source) -> str | None:
    """The license named in the model's own card, if there is one."""
    card = source.folder / "README.md"
    if not card.is_file():  # not `exists`: reading a pipe would wait for ever
        return None
    metadata = None
    with suppress(OSError, ValueError), card.open(encoding="utf-8") as file:
        if block := _CARD_FRONT.match(file.read(strict_yaml.LIMIT)):
            metadata = strict_yaml.parse(block[1])
    license_name = metadata.get("license") if isinstance(metadata, dict) else None
    return license_name if isinstance(license_name, str) else None


def weights_fingerprint(source: Source) -> str:
    """sha256 over the name, dtype, shape and first and last 256 bytes of every tensor, in name
    order; empty where there are no weights.

    It is the same for every sharding of the same weights, and takes seconds for a model of any
    size. Training changes an end of nearly every tensor, so a fine-tune has another fingerprint.
    """
    tensors = tensor_ends(weight_files(source.folder))
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest() if tensors else ""


_STAGE = "fetching the weights"


def fetch_weights(source: Source, progress: Progress) -> None:
    """Fetch a model's weights unless they are on this machine. Raises `ModelUnavailable`.

    Bytes are told where the index of the weights says how many there are: that is fetched with the
    tokenizer, and models of a single file have none.
    """
    total = indexed_bytes(source.folder)
    if source.revision is None or total is None or has_weights(source):
        progress(_STAGE, 0, 0)
        fetch(source)
        return
    with tell_growth(lambda: size_of_all(_arrived(source.folder)), _STAGE, total, progress):
        fetch(source)


def _arrived(snapshot: Path) -> Iterable[Path]:
    """The files of a download so far: whole ones are in the snapshot's folder, as links, and the
    hub's client names others `.incomplete` next to those that the links lead to."""
    yield from snapshot.glob("*.safetensors")
    yield from (snapshot.parent.parent / "blobs").glob("*.incomplete")
