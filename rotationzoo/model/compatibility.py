"""Whether an artifact fits a model: its shapes, RoPE scaling and weights; the files of a model that
the caller loaded; and the LoRA adapters that an evaluation may add."""

import logging
import multiprocessing
import re
import shlex
import shutil
import sys
import weakref
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from warnings import catch_warnings

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.artifact.manifest import hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError, UsageError, as_unavailable
from rotationzoo.geometry import Geometry, cached_rows, check_group_size, head_dims, same_shapes
from rotationzoo.model.files import check_configs, read_headers, weight_files
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.loading import load_config, on_meta
from rotationzoo.model.source import Source, find_cached, has_weights, weights_fingerprint
from rotationzoo.recipe.rope import same_scaling, scaling_of
from rotationzoo.recipe.schema import normalize
from rotationzoo.storage.files import check_regular, read_json
from rotationzoo.words import shortened

_LOG = logging.getLogger(__name__)


def check_artifacts(model: str, artifacts: list[Artifact], geometry: Geometry) -> None:
    """Raise `RotationZooError` for other shapes, group sizes that do not fit, or damage."""
    hint = f"make one with: rotationzoo calibrate {shlex.quote(model)}"
    for artifact in artifacts:
        made_for, cached = cached_rows(artifact.geometry), cached_rows(geometry)
        if made_for != cached:
            held = f"{artifact.folder} holds rotations of {made_for.name}"
            raise RotationZooError(f"{held}, and {model} caches {cached.name}", hint)
        if not same_shapes(artifact.geometry, geometry):
            other = f"other layers, heads or dimensions than {model}: {artifact.manifest.model.id}"
            raise RotationZooError(f"{artifact.folder} was made for a model of {other}", hint)
        check_group_size(artifact.recipe.group_size, head_dims(geometry))
        _ = artifact.rotations  # read now, because weights may take hours to fetch


def settle_rope_scaling(asked: str | None, artifacts: list[Artifact], source: Source) -> str | None:
    """The RoPE scaling to run with: `asked`, or that of the artifacts. `yarn:2` is `yarn:2:8192`
    for 8,192 positions. Raises `UsageError` or `RotationZooError` if it cannot be."""
    try:
        scaling = None if asked is None else normalize(asked)
    except ValueError as error:
        raise UsageError(f"--rope-scaling {error}", hint="--rope-scaling yarn:4") from error
    for artifact in artifacts:
        calibrated = artifact.recipe.rope_scaling
        scaling = scaling or calibrated
        if calibrated is None or scaling is None or calibrated == scaling:
            continue
        made, runs = (scaling_of(load_config(source, each)) for each in (calibrated, scaling))
        if made != runs:
            problem = f"was calibrated with the rope scaling {calibrated}, not {scaling}"
            others = f"give it alone, or with artifacts of --rope-scaling {calibrated}"
            hint = others if asked is None else "leave --rope-scaling out, or name others"
            raise RotationZooError(f"{artifact.folder} {problem}", hint)
    return scaling


def rope_notes(artifacts: list[Artifact], scaling: str | None) -> list[str]:
    """Notes on the model's RoPE scaling, and on artifacts calibrated without it."""
    if scaling is None:
        return []
    plain = [each.folder.resolve().name for each in artifacts if each.recipe.rope_scaling is None]
    notes = [f"{name} was calibrated without that scaling" for name in plain]
    return [f"the model's RoPE is scaled by {scaling}", *notes]


def check_weights(artifacts: list[Artifact], source: Source, anyway: bool) -> None:
    """Raise `RotationZooError` for artifacts known to be of other weights, unless `anyway`."""
    for note in filter(None, (other_weights_note(artifact, source) for artifact in artifacts)):
        if not anyway:
            make = f"make one with: rotationzoo calibrate {shlex.quote(source.name)}"
            raise RotationZooError(note, hint=f"{make}; or add --anyway")


def other_weights_note(artifact: Artifact, source: Source) -> str | None:
    """A note for an artifact known to be made for another config or other weights, or None."""
    model = artifact.manifest.model
    fingerprint = model.weights_fingerprint  # which imported files do not always state
    same_config = model.config_sha256 == hash_config(source.folder)
    if same_config and (fingerprint is None or fingerprint == weights_fingerprint(source)):
        return None
    return f"{artifact.folder.resolve().name} was made for other weights than {source.name} has"


def check_fits(artifact: Artifact, model: PreTrainedModel) -> None:
    """Raise `RotationZooError` for an artifact of another model or RoPE scaling."""
    check_artifacts(model.name_or_path or type(model).__name__, [artifact], geometry_of(model))
    wanted, present = artifact.recipe.rope_scaling, scaling_of(model.config)
    if not same_scaling(wanted, present):
        runs = f"and this model runs {f'with {present}' if present else 'without'}"
        hint = "load the model with the same scaling in the rope_parameters of its config"
        problem = f"{artifact.folder} was calibrated with the rope scaling {wanted}, {runs}"
        raise RotationZooError(problem, hint)


def warn_of_other_weights(artifact: Artifact, model: PreTrainedModel) -> None:
    """Log a warning where the files of a model are not those that an artifact was made for."""
    source = source_of(model)
    if source is None or not has_weights(source):
        return
    if note := other_weights_note(artifact, source):
        _LOG.warning("%s; see: rotationzoo verify", note)


def source_of(model: PreTrainedModel) -> Source | None:
    """Where a model was loaded from, or None where this is not known, or not on this machine."""
    name, commit = model.name_or_path or "", getattr(model.config, "_commit_hash", None)
    if name and Path(name).is_dir():
        return Source(name, Path(name), None)
    return find_cached(name, commit) if commit else None


# ---- a model that the caller loaded, which runs as it is


def take_loaded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Source:
    """A loaded model's source: its files, or a folder with its config if it has none or changed."""
    source = source_of(model)
    if source is None or not _is_in(source.folder, model):
        folder = Path(mkdtemp(prefix="rotationzoo-"), type(model).__name__)
        weakref.finalize(model, shutil.rmtree, folder.parent, ignore_errors=True)
        model.config.save_pretrained(folder)
        source = Source(str(folder), folder, None)
    return replace(source, model=model, tokenizer=tokenizer)


def _is_in(folder: Path, model: PreTrainedModel) -> bool:
    """Whether the files in a folder have the model's config, and the first and the last row of each
    of its weights. Training changes one of them in nearly every tensor."""
    stored, parameters = read_headers(weight_files(folder)), dict(model.named_parameters())
    if not parameters.keys() <= stored.keys():  # as where it was read from a GGUF file
        return False
    if _lines(AutoConfig.from_pretrained(folder)) != _lines(model.config):
        return False
    for name, parameter in parameters.items():
        with safe_open(stored[name].file, "pt") as file:
            tensor = torch.atleast_1d(file.get_tensor(name))
        rows = torch.atleast_1d(parameter)
        same = tensor.shape == rows.shape and not parameter.is_meta
        if not same or not torch.equal(tensor[[0, -1]].to(rows), rows[[0, -1]]):
            return False
    return True


def _lines(config: PretrainedConfig) -> list[str]:
    """A config as text, without the type of the weights, which whoever loads them chooses."""
    return [line for line in config.to_json_string().splitlines() if '"dtype"' not in line]


# ---- an adapter, in a folder as peft writes it

_WEIGHTS, _OTHER = "adapter_model.safetensors", "give an adapter of this model"
_SECONDS = 10  # a model of 18,000 modules takes 3
# Peft takes a config at its word: other keys import modules, read files or copy layers.
_KNOWN = (
    "alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config "
    "exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform lora_alpha "
    "lora_bias lora_dropout modules_to_save peft_version r rank_pattern revision target_modules "
    "target_parameters task_type trainable_token_indices use_dora use_rslora"
)
_VALUES = {  # as Python writes those that are harmless
    **dict.fromkeys(_KNOWN.split(), "(?s).*"),
    "init_lora_weights": "True|False|gaussian|orthogonal|eva|olora|pissa(_niter_[0-9]{1,2})?",
    "megatron_core": r"megatron\.core",
    "peft_type": "LORA",
    "qalora_group_size": "16",
}


def read_adapter(folder: Path) -> dict[str, Any]:
    """The config of an adapter. Raises `RotationZooError` without it or peft, or for unread
    keys."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        hint = "give a folder that peft's save_pretrained has written"
        raise RotationZooError(f"{folder} holds no adapter: it has no {path.name}", hint)
    if find_spec("peft") is None:
        raise RotationZooError("peft is not installed", hint="run: pip install 'peft>=0.20'")
    check_regular(folder / _WEIGHTS)
    check_configs(folder, str(folder))
    table = {"peft_type": "none", **read_json(path)}
    for key, value in table.items():
        if value and not re.fullmatch(_VALUES.get(key, ""), str(value)):
            problem = f"{path} sets {shortened(key)} to {shortened(str(value))}, which is not read"
            hint = "give a LoRA adapter without it, or a model that merge_and_unload has made"
            raise RotationZooError(problem, hint)
    return {key: table[key] for key in table.keys() & _VALUES.keys()}


def check_adapter(folder: Path, config: PretrainedConfig, label: str) -> list[str]:
    """Notes on an adapter for this model. Raises `ModelUnavailable` for one that does not fit, or
    asks for more time or memory than its weights need."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    # Peft compares names as expressions, which only the end of a process stops.
    with as_unavailable(f"{folder} does not fit the model", _OTHER), context.Pool(1) as pool:
        answer = pool.apply_async(_try_adapter, (folder, config, label))
        answer.wait(_SECONDS)
        if not answer.ready():
            raise TimeoutError(f"its names of modules take more than {_SECONDS} s")
        answer.get()
    base = Path(str(read_adapter(folder).get("base_model_name_or_path") or label)).name
    other = base.casefold() != Path(label).name.casefold()
    return [f"The adapter names the base model {shortened(base)}, and this is {label}"] * other


def _try_adapter(folder: Path, config: PretrainedConfig, label: str) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model, size = on_meta(config, label), (folder / _WEIGHTS).stat().st_size
    before = model.num_parameters()
    # Other starts decompose weights.
    lora = LoraConfig(**read_adapter(folder) | {"init_lora_weights": True})
    with torch.device("meta"), catch_warnings(action="ignore"):
        inject_adapter_in_model(lora, model, low_cpu_mem_usage=True)
    # Experts that are fused have twice as many numbers as the file.
    if (made := model.num_parameters() - before) > 2 * size:
        raise ValueError(f"it asks for {made:,} numbers, and its weights have {size:,} bytes")


def add_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Add a folder's adapter to the model. Raises `ModelUnavailable` if it does not fit."""
    import peft

    misfit = as_unavailable(f"{folder} does not fit the model", _OTHER)
    with misfit, catch_warnings(action="ignore"):
        # Peft's own reader: that of transformers misnames what is no matrix of LoRA.
        wrapped = peft.PeftModel(model, peft.LoraConfig(**read_adapter(folder)))
        stored = load_file(folder / "adapter_model.safetensors")
        expected = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        # Peft would only warn of an adapter of fewer or more layers.
        if other := sorted(stored.keys() ^ expected.keys()):
            raise ValueError(f"only one of them has {other[0]}")
        peft.set_peft_model_state_dict(wrapped, stored)
    model.eval()
