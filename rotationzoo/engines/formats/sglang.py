"""The SGLang engine, which reads a pair of `.pt` files, or for latents (MLA) one file per layer.

The 2-bit cache is in OSCAR's server, and that of keys and values also in its pull request to
SGLang. Environment variables name the files.
"""

import shlex
from pathlib import Path

from rotationzoo.artifact.reductions import Settled
from rotationzoo.engines.base import PAGE, Launch, Payload
from rotationzoo.engines.formats.oscar_pt import write_pair, write_pt
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers

_PAGE = 8  # tokens leave the exact window in pages of this size
_WINDOWS = "add: --windows 64/256"
_PACKED = 512  # the dimension of the latents that OSCAR ran packed
_GROUPS = 32, 128  # the group sizes that OSCAR measured for latents


def write_files(work: Path, final: Path, payload: Payload, request: Settled) -> Launch:
    """Write the files to `work`. Raises `RotationZooError` for what SGLang's kernels cannot run."""
    if request.engine == "sglang-mla":
        return _write_latents(work, final, payload, request)
    sizes = [("head dimension", dim) for dim in sorted(payload.head_dims)]
    for what, size in (*sizes, ("quantization groups of", payload.largest_group)):
        if size & (size - 1):
            raise RotationZooError(f"SGLang cannot run {what} {size}: only powers of two", PAGE)
    if not any(request.windows):
        raise RotationZooError("SGLang cannot run 2 bits without exact tokens", hint=_WINDOWS)
    for name, tokens in zip(("sink", "recent"), request.windows, strict=True):
        if tokens % _PAGE:
            exact = f"keep {tokens} {name} tokens exact: only multiples of {_PAGE}"
            raise RotationZooError(f"SGLang cannot {exact}", hint=_WINDOWS)
    environment = {
        "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
        **write_pair(work, final, payload, request, "SGLANG_OSCAR"),
        **_windows_of(request),
    }
    options = ["--kv-cache-dtype int2"]
    # Without this option, the whole head of each layer is one group.
    if payload.group_size or len(payload.head_dims) == 1:
        options.append(f"--kv-cache-quant-group-size {payload.largest_group}")
    options.append(f"--page-size {_PAGE}")
    options.append("--prefill-attention-backend triton --decode-attention-backend triton")
    return Launch([_command(payload, options)], environment, _notes(payload))


def _write_latents(work: Path, final: Path, payload: Payload, request: Settled) -> Launch:
    """Write a matrix `[D, D]` for each layer, for `c @ R`. The server reads the folder `final`."""
    for layer, matrix in payload.key.rotation.items():
        write_pt(work / f"layer_{layer}.pt", matrix.float().contiguous().clone())
    packed = payload.head_dims == {_PACKED}
    environment = {
        "SGLANG_OSCAR_MLA_KV_ROTATION_PATH": str(final),
        "SGLANG_OSCAR_MLA_KV_GROUP_SIZE": str(payload.largest_group),
        "SGLANG_OSCAR_MLA_KV_BITS": "2",
        # Without it, latents go through 2 bits and are stored in the model's type.
        "SGLANG_OSCAR_MLA_KV_PACKED": str(int(packed)),
        # Packed latents get Lloyd-Max levels by default, which `evaluate` does not simulate.
        "SGLANG_LLOYD_MAX": "0",
        "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
        **_windows_of(request),
    }
    # In fp8, entries of a rotation of 512 x 512 become subnormal.
    options = ["--kv-cache-dtype bfloat16"]
    if packed:  # other backends ask the pool for rows in the model's type, which it does not have
        options.append("--attention-backend triton")
    return Launch([_command(payload, options)], environment, _notes_on_latents(payload, packed))


def _windows_of(request: Settled) -> dict[str, str]:
    """The variables that say which tokens stay exact, and in what types."""
    sink, recent = request.windows
    return {
        "SGLANG_MIXED_KV_PREFIX_TOKENS": str(sink),
        "SGLANG_MIXED_KV_RECENT_TOKENS": str(recent),
        "SGLANG_MIXED_KV_HP_DTYPE": "bfloat16",
        "SGLANG_MIXED_KV_SCALE_DTYPE": "float32",
    }


def _command(payload: Payload, options: list[str]) -> str:
    start = f"python -m sglang.launch_server --model-path {shlex.quote(payload.model)}"
    buffer = ["--mamba-radix-cache-strategy extra_buffer"] * _is_hybrid(payload)
    return " ".join([start, *options, *buffer])


def _is_hybrid(payload: Payload) -> bool:
    """Whether only some layers of the model have a cache."""
    layers = max(layer.index for layer in payload.geometry) + 1
    return len(cached_layers(payload.geometry)) < layers


def _notes(payload: Payload) -> list[str]:
    notes = [
        "needs OSCAR's SGLang, or a SGLang with pull request 32129",
        "keep both files where the variables say: if one is missing, a server of October 2026 "
        "calibrates at its start and writes a pair of its own there",
    ]
    if _is_hybrid(payload):
        notes.append("only some layers of this model cache keys: their numbers count all layers")
    largest_dim = max(payload.head_dims)
    if payload.largest_group < largest_dim:
        notes.append(
            f"{largest_dim // payload.largest_group} groups a head: the server's prefill with more "
            "than one is unverified; compare its answers with one group a head first"
        )
    if payload.key.mean:
        notes.append(
            "the key mean (version 3) needs a server that reads k_mean, as OSCAR's of October "
            "2026 (commit 0c88a3d1); others ignore it"
        )
    return notes


def _notes_on_latents(payload: Payload, packed: bool) -> list[str]:
    notes = [
        "needs OSCAR's SGLang; these files follow its own tools, and no server has read them here",
        "a layer without its file is served without rotation, and nothing says so",
        "requests that share a cached prefix may lose its exact tokens: --disable-radix-cache "
        "keeps them",
    ]
    if packed:
        notes += [
            "SGLANG_LLOYD_MAX=1 takes Lloyd-Max levels, which its makers prefer and `evaluate` "
            "does not simulate",
            "triton attends to every token: a model with sparse attention (DSA, as GLM-5) keeps it "
            "without --attention-backend",
        ]
    else:
        notes.append(f"stored unpacked: its makers ran packed latents of {_PACKED} elements alone")
    group = payload.largest_group
    if group not in _GROUPS:
        groups = " and ".join(map(str, _GROUPS))
        notes.append(f"one scale for {group} channels; its makers measured {groups}")
    return notes
