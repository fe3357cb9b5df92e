"""The SGLang engine, which reads a pair of `.pt` files.

The 2-bit cache is in OSCAR's server and its pull request to SGLang; two variables name the files.
"""

import shlex
from pathlib import Path

from rotationzoo.artifact.reductions import Settled
from rotationzoo.engines.base import Launch, Payload, check_limits
from rotationzoo.engines.formats.oscar_pt import write_pair
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers

_PAGE = 8  # tokens leave the exact window in pages of this size
_WINDOWS = "add: --windows 64/256"


def write_files(work: Path, final: Path, payload: Payload, request: Settled) -> Launch:
    """Write the pair to `work`. Raises `RotationZooError` for what SGLang's kernels cannot run."""
    check_limits("SGLang", payload, powers=True)
    cannot, group = "SGLang cannot", payload.largest_group
    if group & (group - 1):
        raise RotationZooError(f"{cannot} run quantization groups of {group}: only powers of two")
    if not any(request.windows):
        raise RotationZooError(f"{cannot} run 2 bits without exact tokens", hint=_WINDOWS)
    for name, tokens in zip(("sink", "recent"), request.windows, strict=True):
        if tokens % _PAGE:
            exact = f"keep {tokens} {name} tokens exact: only multiples of {_PAGE}"
            raise RotationZooError(f"{cannot} {exact}", hint=_WINDOWS)
    environment = {
        "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
        **write_pair(work, final, payload, request, "SGLANG_OSCAR"),
        **windows_of(request),
    }
    return Launch([_command(payload)], environment, _notes(payload))


def windows_of(request: Settled) -> dict[str, str]:
    """The variables that say which tokens stay exact, and in what types."""
    sink, recent = request.windows
    return {
        "SGLANG_MIXED_KV_PREFIX_TOKENS": str(sink),
        "SGLANG_MIXED_KV_RECENT_TOKENS": str(recent),
        "SGLANG_MIXED_KV_HP_DTYPE": "bfloat16",
        "SGLANG_MIXED_KV_SCALE_DTYPE": "float32",
    }


def _command(payload: Payload) -> str:
    words = [
        f"python -m sglang.launch_server --model-path {shlex.quote(payload.model)}",
        "--kv-cache-dtype int2",
    ]
    # Without this option, the whole head of each layer is one group.
    if payload.group_size or len(payload.head_dims) == 1:
        words.append(f"--kv-cache-quant-group-size {payload.largest_group}")
    words.append(f"--page-size {_PAGE}")
    words.append("--prefill-attention-backend triton --decode-attention-backend triton")
    return " ".join([*words, *options_of_hybrids(payload)])


def options_of_hybrids(payload: Payload) -> list[str]:
    """What the command of a model needs in which only some layers cache anything."""
    layers = max(layer.index for layer in payload.geometry) + 1
    is_hybrid = len(cached_layers(payload.geometry)) < layers
    return ["--mamba-radix-cache-strategy extra_buffer"] if is_hybrid else []


def _notes(payload: Payload) -> list[str]:
    notes = [
        "needs OSCAR's SGLang, or a SGLang with pull request 32129",
        "keep both files where the variables say: if one is missing, a server of October 2026 "
        "calibrates at its start and writes a pair of its own there",
    ]
    if options_of_hybrids(payload):
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
