"""The llama.cpp engine, which reads rotations from tensors in a copy of the model's GGUF file.

Two forks have a 2-bit cache: OSCAR's, and one that grew from it.
"""

import shlex
from pathlib import Path

from rotationzoo.engines.base import Launch, Options, Payload, clip_text
from rotationzoo.engines.formats.gguf_comparison import check_base, compare_base
from rotationzoo.engines.formats.gguf_file import gguf_package, open_gguf, read_field, write_copy
from rotationzoo.engines.formats.gguf_rotations import rotation_tensors
from rotationzoo.engines.formats.reading import PAGE, check_equal_dims, objective_name
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers

# Architecture -> cache type. `q2_0` belongs to OSCAR's fork. `oscar2` belongs to the other fork,
# which neither clips nor keeps tokens exact.
_CACHE_TYPE = {"qwen3": "q2_0", "qwen3moe": "oscar2", "qwen35": "oscar2", "gemma4": "oscar2"}
_BLOCK = 32  # channels per block of either cache type


def check_payload(payload: Payload) -> None:
    """Raise `RotationZooError` for what neither fork can run."""
    check_equal_dims("llama.cpp", payload)
    gguf_package()
    for layer in cached_layers(payload.geometry):
        if layer.key_dim % _BLOCK:
            raise RotationZooError(
                f"llama.cpp cannot run head dimension {layer.key_dim}: its blocks have {_BLOCK} "
                "channels",
                hint=PAGE,
            )


def write_files(work: Path, final: Path, payload: Payload, options: Options) -> Launch:
    """Write a copy of the base model, with rotations added, to `work`.

    Raises `RotationZooError` for a base that does not fit.
    """
    base = options.base
    if base is None:
        raise RotationZooError(
            "llama.cpp reads rotations from the model's own file", hint="name it: --base MODEL.gguf"
        )
    reader = open_gguf(base)
    # `objective_name` reduces any untrusted field to short printable text.
    architecture = objective_name(read_field(reader, "general.architecture"))
    _check_architecture(architecture, base, payload)
    check_base(reader, base, payload)
    compared = compare_base(reader, base, payload, options.model)
    name = f"{base.stem}-rot-kv.gguf"
    tensors = rotation_tensors(payload, options.engine_hadamard)
    value_objective = "in the weights" if payload.value is None else payload.value.objective
    fields = {
        **payload.provenance,
        "key_objective": payload.key.objective,
        "engine_hadamard": options.engine_hadamard,
        "value_objective": value_objective,
    }
    write_copy(reader, architecture, work / name, tensors, fields)

    kind = _CACHE_TYPE[architecture]
    command = (
        f"llama-server -m {shlex.quote(str(final / name))} "
        f"--cache-type-k {kind} --cache-type-v {kind} -fa on"
    )
    environment = _environment(architecture, payload, options)
    return Launch([command], environment, _notes(kind, payload, options, compared))


def _check_architecture(architecture: str, base: Path, payload: Payload) -> None:
    """Raise `RotationZooError` for what the loaders of the two forks do not accept."""
    if architecture not in _CACHE_TYPE:
        raise RotationZooError(
            f"{base.name} is of architecture {architecture}; rotations are loaded for "
            f"{', '.join(_CACHE_TYPE)} alone",
            hint=PAGE,
        )
    dims = {layer.key_dim for layer in cached_layers(payload.geometry)}
    if len(dims) > 1 and architecture != "gemma4":
        raise RotationZooError(
            f"llama.cpp loads one head dimension for {architecture}, and this artifact has "
            f"{sorted(dims)}"
        )
    clips_or_windows = payload.clip != (1, 1) or payload.sink or payload.recent
    if _CACHE_TYPE[architecture] == "oscar2" and clips_or_windows:
        raise RotationZooError(
            f"the llama.cpp that runs {architecture} neither clips nor keeps tokens exact",
            hint="accept that with: --clip 1 --windows 0/0",
        )


def _environment(architecture: str, payload: Payload, options: Options) -> dict[str, str]:
    # The first variable turns off a Hadamard transform in the quantizer, the second one in the
    # graph.
    environment = {"LLAMA_KV_NO_HADAMARD": "1"}
    if not options.engine_hadamard:
        environment["LLAMA_ATTN_ROT_DISABLE"] = "1"
    if _CACHE_TYPE[architecture] == "q2_0":
        clip, _ = payload.clip
        environment["LLAMA_KV_CLIP_RATIO"] = clip_text(clip, off=1)
        environment["LLAMA_KV_HP_SINK"] = str(payload.sink)
        environment["LLAMA_KV_HP_RECENT"] = str(payload.recent)
    if architecture == "gemma4" and payload.value is not None:
        environment["LLAMA_KV_V_ROT"] = "1"
    return environment


def _notes(kind: str, payload: Payload, options: Options, compared: str) -> list[str]:
    notes = ["needs llama-cpp-turboquant"]
    if kind == "q2_0":
        notes = ["needs OSCAR's fork of llama.cpp (branch zhongzhu/llamacpp)"]
    if options.engine_hadamard:
        notes.append(
            "these rotations need llama.cpp's own attention rotation (its pull request 21038): see "
            "that it is on"
        )
    else:
        notes.append(
            "without these variables llama.cpp applies a Hadamard transform of its own, which "
            "cancels the calibrated one; --engine-hadamard writes rotations that count on it"
        )
    if kind == "q2_0":
        notes.append(
            "its q2_0 rounds to a codebook of its own, on blocks of 128 channels: not the codec of "
            "`evaluate`; as it ships, with outer levels a third too small, rotations can serve "
            "worse than none (docs/engines.md has figures), and without exact windows it is of no "
            "use"
        )
    notes.append(compared)
    notes.append(
        "keep the base: llama.cpp itself refuses the copy, whose rotations it does not know (wrong "
        "number of tensors)"
    )
    if payload.value is None:
        notes.append(
            "no value rotation is written: the base must be converted from weights that carry it"
        )
    return notes
