"""The vLLM engine (pull request 46774), which reads a pair of `.pt` files, one matrix a layer."""

import shlex
from pathlib import Path

from rotationzoo.artifact.reductions import Settled
from rotationzoo.engines.base import PAGE, Launch, Payload, check_equal_dims
from rotationzoo.engines.formats.oscar_pt import write_pair
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers

_NAME = "vLLM's pull request"


def write_files(work: Path, final: Path, payload: Payload, request: Settled) -> Launch:
    """Write the pair to `work`. Raises `RotationZooError` for what that vLLM cannot run."""
    check_equal_dims(_NAME, payload)
    if payload.group_size is None and len(payload.head_dims) > 1:
        whole = f"this artifact's groups are whole heads of {sorted(payload.head_dims)} channels"
        raise RotationZooError(f"{_NAME} takes one group size, and {whole}", PAGE)
    for layer in cached_layers(payload.geometry):
        if payload.group_size is not None and payload.group_size < layer.key_dim:
            groups = f"this artifact has groups of {payload.group_size}"
            raise RotationZooError(f"{_NAME} keeps one scale per head, and {groups}", PAGE)
    environment = write_pair(work, final, payload, request, "VLLM_OSCAR")
    environment["VLLM_OSCAR_GROUP_SIZE"] = str(payload.largest_group)
    notes = [
        "these files need a vLLM with pull request 46774",
        "a path that is wrong, or a layer that is missing, serves without rotation and says so "
        "only in the log",
    ]
    command = f"vllm serve {shlex.quote(payload.model)} --kv-cache-dtype oscar_int2"
    return Launch([command], environment, notes)
