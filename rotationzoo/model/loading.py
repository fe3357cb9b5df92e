"""One causal language model: its config, its shapes on `meta`, its weights on one device or spread
over many."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rotationzoo.errors import (
    ModelUnavailable,
    RotationZooError,
    UnsupportedModel,
    UsageError,
    as_unavailable,
)
from rotationzoo.model.geometry import CAUSAL_HINT
from rotationzoo.model.source import Source, config_hash, license_of, read_json, weight_files

_FETCH_HINT = "fetch or save the model again, and upgrade transformers if it is a new one"


def load_config(source: Source) -> PretrainedConfig:
    """The model's config. Raises `ModelUnavailable` if unreadable, `UnsupportedModel` for what is
    no causal decoder."""
    kind = read_json(source.folder / "config.json").get("model_type")
    if not kind:
        raise ModelUnavailable(
            f"{source.name} has no readable config.json with a model_type", hint=_FETCH_HINT
        )
    if kind not in CONFIG_MAPPING:
        raise ModelUnavailable(
            f"transformers does not know the model type {kind!r} of {source.name}",
            hint="upgrade transformers; models that bring their own code are not supported",
        )
    with as_unavailable(f"the config of {source.name} is not valid", hint=_FETCH_HINT):
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{source.name} is an encoder-decoder, not a causal language model", hint=CAUSAL_HINT
        )
    _model_class(config, source.name)
    return config


def describe(source: Source, config: PretrainedConfig, fingerprint: str | None) -> dict[str, Any]:
    """A manifest's `model`: what tells which model an artifact is for."""
    return {
        "id": source.label,
        "revision": source.revision,
        "license": license_of(source),
        "architecture": (config.architectures or [type(config).__name__])[0],
        "config_sha256": config_hash(source),
        "weights_fingerprint": fingerprint,
    }


def _model_class(config: PretrainedConfig, name: str) -> Any:
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModel(
        f"{name} ({config.model_type}) is not a causal language model", hint=CAUSAL_HINT
    )


def on_meta(config: PretrainedConfig, name: str) -> PreTrainedModel:
    """The model as its config describes it, on `meta`: shapes without weights."""
    with as_unavailable(f"{name} cannot be built from its config"), torch.device("meta"):
        return (
            _model_class(config, name)
            .from_config(config, trust_remote_code=False, **_implementations(config))
            .eval()
        )


def _implementations(config: PretrainedConfig) -> dict[str, str | None]:
    """How attention and experts are computed: never as `config.json` says, which may name
    somebody's repository of kernels, whose code would be fetched and run.

    None is the library's own choice, sdpa or eager for each part of a model. Models with a soft cap
    get eager: sdpa drops it without a word, and some versions (5.17, for Gemma 2) choose sdpa all
    the same.
    """
    text = config.get_text_config(decoder=True)
    eager = "eager" in (config._attn_implementation, text._attn_implementation)
    eager = eager or bool(getattr(text, "attn_logit_softcapping", None))
    return {"attn_implementation": "eager" if eager else None, "experts_implementation": None}


def load(
    source: Source,
    config: PretrainedConfig,
    device: str,
    dtype: torch.dtype | str,
    placement: "Placement | None" = None,
    predicts: bool = True,
) -> PreTrainedModel:
    """The model with its weights, in eval mode, on one device or spread by accelerate. Raises
    `ModelUnavailable`.

    Where nothing is made of what it `predicts`, its language-model head may be missing, as it is in
    some checkpoints.

    Quantized weights come in the type that their makers chose, whatever `dtype` says.
    """
    # False, not absent: absent, transformers would ask on the terminal whether to run the
    # repository's own code.
    options: dict[str, Any] = {
        "device_map": device,
        "trust_remote_code": False,
        **_implementations(config),
    }
    if getattr(config, "quantization_config", None):
        dtype = "auto"
    if placement is not None:
        options |= {
            "device_map": placement.device_map,
            "max_memory": placement.max_memory,
            "offload_folder": placement.offload_folder,
        }
    cannot = f"{source.name} could not be loaded"
    try:
        with as_unavailable(cannot, hint=_FETCH_HINT):
            model, found = _model_class(config, source.name).from_pretrained(
                source.folder, config=config, dtype=dtype, output_loading_info=True, **options
            )
    except ModelUnavailable as error:
        if _is_out_of_memory(error.__cause__):
            raise ModelUnavailable(
                f"{source.name} does not fit the memory of {device}", hint="add: --device-map auto"
            ) from error
        if "mismatched_sizes" in str(error):
            raise ModelUnavailable(
                f"{cannot}: its weights do not have the shapes of its config", hint=_FETCH_HINT
            ) from error
        raise
    # transformers fills missing weights with random ones and says so in a warning.
    if missing := sorted(
        name for name in found["missing_keys"] if predicts or "lm_head" not in name
    ):
        raise ModelUnavailable(
            f"{cannot}: {missing[0]} is missing from its weights", hint=_FETCH_HINT
        )
    return model.eval()


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises `ModelUnavailable`."""
    missing = ModelUnavailable(
        f"{source.name} has no readable tokenizer",
        hint="save the model's tokenizer into the same folder",
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # each tokenizer class reads its files in its own way
        raise missing from error
    if not tokenizer("a word").input_ids:  # without its files, transformers makes an empty one
        raise missing
    return tokenizer


def torch_device(device: str) -> str:
    """`auto` is the accelerator where there is one. Raises `UsageError` for one that is not
    there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "this machine has no CUDA device, or this torch was built without CUDA",
            hint="--device cpu",
        )
    return device


def torch_dtype(dtype: str, device: str, device_map: str | None) -> torch.dtype | str:
    """`auto` is the checkpoint's own type on an accelerator or spread over devices, and float32 on
    a CPU alone."""
    if dtype != "auto":
        return getattr(torch, dtype)
    return torch.float32 if torch_device(device) == "cpu" and device_map is None else "auto"


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids go. Of a model whose first weights are offloaded, accelerate takes them from
    the CPU."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


@contextmanager
def forward_errors(model: str, batch: int, length: int) -> Iterator[None]:
    """What goes wrong inside the model's own forward on batches of so many rows of so many tokens,
    as one sentence."""
    try:
        with as_unavailable(f"{model} fails when it runs"):
            yield
    except ModelUnavailable as error:
        if not _is_out_of_memory(error.__cause__):
            raise
        smaller = (
            f"--batch {batch // 2}" if batch > 1 else "--device-map auto, or a shorter --length"
        )
        raise RotationZooError(
            f"a batch of {batch} rows of {length} tokens does not fit the device's memory",
            hint=f"add: {smaller}",
        ) from error


def _is_out_of_memory(error: BaseException | None) -> bool:
    # On a full GPU CUDA's libraries fail in their own ways, before torch's allocator does.
    said = ("CUBLAS_STATUS_ALLOC_FAILED", "cusolverDnCreate")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in said)


@dataclass(frozen=True)
class Placement:
    """accelerate's device map, with memory limits per device and a scratch folder for weights kept
    on disk."""

    device_map: str
    max_memory: dict[int | str, str] | None
    offload_folder: str


@contextmanager
def placement(device_map: str | None, max_memory: str | None) -> Iterator[Placement | None]:
    """Where the weights go, or None for one device; the scratch folder is gone afterwards."""
    if device_map is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rotationzoo-offload-") as folder:
        yield Placement(device_map, memory_limits(device_map, max_memory), folder)


def memory_limits(device_map: str | None, max_memory: str | None) -> dict[int | str, str] | None:
    """`0=20GiB,cpu=60GiB` as accelerate takes it. Raises `UsageError`."""
    if max_memory is None:
        return None
    if device_map is None:
        raise UsageError("--max-memory needs a device map", hint="add: --device-map auto")
    limits: dict[int | str, str] = {}
    for part in filter(None, max_memory.split(",")):
        device, _, amount = part.partition("=")
        if not device or not amount:
            raise UsageError(
                f"--max-memory has no amount in {part!r}",
                hint="write it as: --max-memory 0=20GiB,cpu=60GiB",
            )
        limits[int(device) if device.isdigit() else device] = amount
    return limits


def weights_bytes(source: Source, model: PreTrainedModel) -> int:
    """Size of the weight files where they are local, else of the parameters on `meta` in the
    config's dtype."""
    files = weight_files(source.folder)
    if files:
        return sum(path.stat().st_size for path in files)
    dtype = getattr(model.config.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize
