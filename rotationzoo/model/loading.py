"""Loading a causal language model: its config, tokenizer, shapes on `meta` and weights."""

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import ModuleList

from rotationzoo import errors
from rotationzoo.artifact.manifest import hash_config
from rotationzoo.errors import ModelUnavailable, UnsupportedModel, UsageError, as_unavailable
from rotationzoo.model import files
from rotationzoo.model.geometry import CAUSAL_HINT
from rotationzoo.model.placement import Placement, is_out_of_memory
from rotationzoo.model.quantized import check_codes, dequantize, quantization_of
from rotationzoo.model.source import Source, license_of
from rotationzoo.recipe.rope import apply_scaling, scaling_of
from rotationzoo.storage.files import ROOM, read_json, remedy
from rotationzoo.words import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

READS_MEDIA = "reads_media"
HEADLESS = "headless"
"""The attribute of a model without its language-model head, whose logits are random."""
_TOKENIZERS = ("tokenizer.[jm]*", "vocab.*", "tekken.json")
# Scales of caches and activations, used only by servers, and a constant of old models.
_NO_WEIGHT = re.compile(r"[._]([qkv]|input|output|activation)_(scale|zero_point)$|\.masked_bias$")
_FETCH_HINT = "fetch or save the model again, and upgrade transformers if it is a new one"


def load_config(source: Source, rope_scaling: str | None = None) -> "PretrainedConfig":
    """The config with scaled RoPE. Raises `RotationZooError` if it is not a causal decoder's."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = read_json(source.folder / "config.json").get("model_type")
    if not kind or not isinstance(kind, str):
        problem = f"{source.name} has no readable config.json with a model_type"
        raise ModelUnavailable(problem, _FETCH_HINT)
    if kind not in CONFIG_MAPPING:
        problem = f"transformers does not know the model type {kind!r} of {source.name}"
        hint = "upgrade transformers; models that bring their own code are not supported"
        raise ModelUnavailable(problem, hint)
    with as_unavailable(f"the config of {source.name} is not valid", hint=_FETCH_HINT):
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    if config.is_encoder_decoder:
        problem = f"{source.name} is an encoder-decoder, not a causal language model"
        raise UnsupportedModel(problem, CAUSAL_HINT)
    _model_class(config, source.name)  # for its error
    apply_scaling(config, rope_scaling, source.name)
    return cast("PretrainedConfig", config)


def describe(source: Source, config: "PretrainedConfig", fingerprint: str | None) -> dict[str, Any]:
    """The `model` table of a manifest."""
    return {
        "id": source.label,
        "revision": source.revision,
        "license": license_of(source),
        "architecture": (config.architectures or [type(config).__name__])[0],
        "config_sha256": hash_config(source.folder),
        "weights_fingerprint": fingerprint,
    }


def _model_class(config: "PretrainedConfig", name: str) -> Any:
    """The auto class of a config, for text unless `READS_MEDIA`. Raises `UnsupportedModel`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    autos = (AutoModelForCausalLM, AutoModelForImageTextToText)
    for auto in autos[::-1] if hasattr(config, READS_MEDIA) else autos:
        if type(config) in auto._model_mapping:
            return auto
    problem = f"{name} ({config.model_type}) is not a causal language model"
    raise UnsupportedModel(problem, CAUSAL_HINT)


def on_meta(config: "PretrainedConfig", name: str) -> "PreTrainedModel":
    """Build the model from its config on `meta`, without weights. Raises `ModelUnavailable`."""
    files.check_count(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0), name)
    with as_unavailable(f"{name} cannot be built from its config"), torch.device("meta"):
        model_class = _model_class(config, name)
        options = _implementations(config)
        try:
            model = model_class.from_config(config, trust_remote_code=False, **options)
        except KeyError as error:
            if str(scaling_of(config)).partition(":")[0] in error.args:
                unknown = f"transformers does not support RoPE of type {error}, which {name} has"
                raise ModelUnavailable(unknown, _FETCH_HINT) from error
            raise
    return cast("PreTrainedModel", model.eval())


def _implementations(config: "PretrainedConfig") -> dict[str, str | None]:
    """The implementations of attention and experts; None is the library's choice. `config.json` is
    ignored, because it may name code to fetch. Soft caps need eager, because sdpa drops them."""
    text = config.get_text_config(decoder=True)
    eager = "eager" in (config._attn_implementation, text._attn_implementation)
    eager = eager or bool(getattr(text, "attn_logit_softcapping", None))
    return {"attn_implementation": "eager" if eager else None, "experts_implementation": None}


def load(
    source: Source,
    config: "PretrainedConfig",
    device: str,
    dtype: torch.dtype | str,
    placement: Placement | None = None,
    predicts: bool = True,
) -> "PreTrainedModel":
    """Load the model in eval mode. Quantized weights ignore `dtype`, but for a GGUF file's. Unless
    it `predicts`, the head may be missing. Raises `ModelUnavailable`."""
    paths, cannot = files.weight_files(source.folder), f"{source.name} could not be loaded"
    config = copy.deepcopy(config)  # the caller's stays as it is
    is_single = bool(paths) and paths[0].name == files.SINGLE
    config.transformers_weights = files.SINGLE if is_single else files.INDEX
    if quantization_of(config):
        dtype = "auto"
        dequantize(config)
    if device == "cuda":
        # Under torchrun, transformers would use the local rank's GPU, even if only one is visible.
        device = f"cuda:{torch.cuda.current_device()}"
    of_gguf = _gguf_options(paths)
    where = (placement or {"device_map": device}) | of_gguf
    # transformers always shows progress for a GGUF file.
    hidden = redirect_stderr(StringIO()) if of_gguf else nullcontext()
    try:
        with as_unavailable(cannot, hint=_FETCH_HINT), hidden:
            # The tensors of a GGUF file have other names and codes.
            stored = {} if of_gguf else files.read_headers(paths)
            check_codes(stored, config, source.name)
            model, loading_info = _model_class(config, source.name).from_pretrained(
                source.folder,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                # By default, transformers asks on the terminal whether to run remote code.
                trust_remote_code=False,
                **where,
                **_implementations(config),
            )
    except ModelUnavailable as error:
        if is_out_of_memory(error.__cause__):
            says = f"{source.name} does not fit the memory of {device}"
            hint = "add: --device-map auto"
        elif placement is not None and remedy(error.__cause__) == ROOM:
            folder = placement["offload_folder"]
            says = f"the disk of {folder} is full, and not all weights fit memory"
            hint = "make room, or name a folder on a larger disk: export TMPDIR=FOLDER"
        elif "mismatched_sizes" in str(error):
            says = f"{cannot}: its weights do not have the shapes of its config"
            hint = _FETCH_HINT
        else:
            raise
        raise ModelUnavailable(says, hint) from error
    missing = sorted(loading_info["missing_keys"])
    if not predicts:
        needed = [name for name in missing if "lm_head" not in name]
        setattr(model, HEADLESS, missing != needed)
        missing = needed
    if missing:  # transformers only warns, and fills them with random numbers
        raise ModelUnavailable(f"{cannot}: {missing[0]} is missing from its weights", _FETCH_HINT)
    if unused := _find_unused(model, loading_info["unexpected_keys"]):
        problem = f"{cannot}: its weights have {unused[0]}, which its config does not use"
        hint = "fetch config.json and the weights again, both of one model and revision"
        raise ModelUnavailable(problem, hint)
    return cast("PreTrainedModel", model.eval())


def _gguf_options(paths: list[Path]) -> dict[str, Any]:
    """The options to load a GGUF file; none for other weights."""
    import transformers

    if not paths or paths[0].name != files.GGUF:
        return {}
    options: dict[str, Any] = {"gguf_file": str(paths[0])}
    # Since 5.24, transformers keeps codes on a GPU, and fetches kernels for them from a hub.
    if config_class := getattr(transformers, "GgufConfig", None):
        options["quantization_config"] = config_class(dequantize=True)
    return options


def _find_unused(model: "PreTrainedModel", unexpected: set[str]) -> list[str]:
    """The `unexpected` tensors in a checkpoint that belong to modules which the model has."""
    modules, text = dict(model.named_modules()), model.config.get_text_config(decoder=True)
    lists = tuple(f"{name}." for name, each in modules.items() if isinstance(each, ModuleList))
    predictors = range(getattr(text, "num_nextn_predict_layers", None) or 0)
    extra = {f"{each}{text.num_hidden_layers + i}" for each in lists for i in predictors}

    def absent_part(name: str) -> str:
        steps = accumulate(name.split(".")[:-1], "{}.{}".format)
        return next((step for step in steps if step not in modules), "")

    parts = {absent_part(name) for name in unexpected}
    others = [part for part in parts if part and (part in extra or not part.startswith(lists))]
    missed = [name for name in unexpected if absent_part(name) not in others]
    used = dict(model.named_buffers())
    missed = [name for name in missed if name not in used and not _NO_WEIGHT.search(name)]
    return sorted(missed)


def check_ids(rows: Iterable[torch.Tensor], config: "PretrainedConfig", name: str) -> None:
    """Raise `ModelUnavailable` for token ids without a row in the model's embedding."""
    size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    largest = max(int(row.max()) for row in rows)
    if size is not None and largest >= size:
        problem = f"makes token {largest:,}, and its embedding has {size:,} rows"
        hint = "give it its own tokenizer, or more rows: resize_token_embeddings(len(tokenizer))"
        raise ModelUnavailable(f"the tokenizer of {name} {problem}", hint)


def load_tokenizer(source: Source) -> "PreTrainedTokenizerBase":
    """The model's tokenizer. Raises `ModelUnavailable`."""
    from transformers import AutoTokenizer

    found = any(any(source.folder.glob(each)) for each in _TOKENIZERS)
    absent = "" if found else ": its tokenizer.json is not there"
    hint = source.fetch_hint or "save the model's tokenizer into the same folder"
    missing = ModelUnavailable(f"{source.name} has no readable tokenizer{absent}", hint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # each tokenizer class fails in its own way
        raise missing from error
    # Without files, transformers returns an empty tokenizer.
    if not tokenizer("a word").input_ids:
        raise missing
    return tokenizer


def load_processor(source: Source) -> Any:
    """The processor of a model that reads images or audio. Raises `ModelUnavailable`."""
    from transformers import AutoProcessor, ProcessorMixin

    hint = "save it to the model; it may need: pip install 'pillow>=11' 'torchvision>=0.23'"
    with as_unavailable(f"{source.name} has no processor for images and audio", hint=hint):
        processor = AutoProcessor.from_pretrained(source.folder, trust_remote_code=False)
        # Without a processor's files, transformers returns the tokenizer.
        if not isinstance(processor, ProcessorMixin):
            raise TypeError("its files are missing")
        return processor


def torch_device(device: str) -> str:
    """An available device; `auto` is CUDA if available. Raises `UsageError`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        problem = "this machine has no CUDA device, or this torch was built without CUDA"
        raise UsageError(problem, "--device cpu")
    return device


def input_device(model: "PreTrainedModel") -> torch.device:
    """The device for token ids: the CPU if the first weights are offloaded."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


@contextmanager
def forward_errors(model: str, batch: int, length: int) -> Iterator[None]:
    """Turn an error of a forward pass on `batch` rows of `length` tokens into one sentence."""
    try:
        with as_unavailable(f"{model} fails when it runs"):
            yield
    except ModelUnavailable as error:
        if not is_out_of_memory(error.__cause__):
            raise
        rows = f"a batch of {counted(batch, 'row')} of {length} tokens"
        smaller = "--device-map auto, or a shorter --length"
        hint = f"add: --batch {batch // 2}" if batch > 1 else f"add: {smaller}"
        raise errors.RotationZooError(f"{rows} does not fit the device's memory", hint) from error
