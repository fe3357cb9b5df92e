"""vLLM with the 2-bit cache of pull request 46774: a pair of `.pt` files with one matrix a
layer."""

import shlex
from pathlib import Path

from rotationzoo.engines.base import (
    OTHERS,
    Capabilities,
    Launch,
    Options,
    Payload,
    number,
    one_dim,
    one_group,
)
from rotationzoo.engines.formats import oscar_pt
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import Geometry, cached_layers

NAME = "vllm"
CAPABILITIES = Capabilities(heads=False, mean=False, clip="side", windows=False)


def check(geometry: Geometry, serving: Payload) -> None:
    """Raise `RotationZooError` for what the pull request cannot run."""
    one_dim("vLLM's pull request", geometry)
    one_group("vLLM's pull request", geometry, serving)
    for layer in cached_layers(geometry):
        if serving.group_size is not None and serving.group_size < layer.key_dim:
            raise RotationZooError(
                f"vLLM's pull request keeps one scale a head, and this artifact has groups of {serving.group_size}",
                hint=OTHERS,
            )


def write(work: Path, final: Path, serving: Payload, options: Options) -> Launch:
    """Write the pair to `work`; the launch line names it in `final`."""
    key, value = oscar_pt.write_pair(work, serving)
    key_clip, value_clip = serving.clip
    environment = {
        "VLLM_OSCAR_K_ROTATION_PATH": str(final / key),
        "VLLM_OSCAR_V_ROTATION_PATH": str(final / value),
        "VLLM_OSCAR_K_CLIP_RATIO": number(key_clip, off=0),
        "VLLM_OSCAR_V_CLIP_RATIO": number(value_clip, off=0),
        "VLLM_OSCAR_GROUP_SIZE": str(serving.group),
    }
    notes = [
        "needs a vLLM with pull request 46774",
        "a path that is wrong, or a layer that is missing, serves without rotation and says so only in the log",
    ]
    return Launch(
        [f"vllm serve {shlex.quote(serving.model or 'MODEL')} --kv-cache-dtype oscar_int2"],
        environment,
        notes,
    )
