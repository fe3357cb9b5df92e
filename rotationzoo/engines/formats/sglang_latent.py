"""SGLang with latents (MLA), whose folders of `.pt` files, one a layer, are written and read.

The 2-bit cache of latents is in OSCAR's own server, which finds the folder by an environment
variable. Each file holds one float32 matrix R `[D, D]`, for `c @ R`.
"""

import re
import shlex
from pathlib import Path

from rotationzoo.artifact.reductions import Settled
from rotationzoo.engines.base import Launch, Payload, RotationFile, SideMatrices, check_layer
from rotationzoo.engines.formats.oscar_pt import Entries, load, tensors_of, write_pt
from rotationzoo.engines.formats.sglang import options_of_hybrids, windows_of
from rotationzoo.errors import RotationZooError
from rotationzoo.sides import LATENT

_OF_A_LAYER = re.compile(r"layer_\d{1,9}\.pt")
_PACKED = 512  # elements of the latents that its makers ran packed
_GROUPS = 32, 128  # channels that share a scale, with which its makers measured


def write_files(work: Path, final: Path, payload: Payload, request: Settled) -> Launch:
    """Write a file for each layer to `work`. The environment variables name the folder `final`."""
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
        **windows_of(request),
    }
    model = shlex.quote(payload.model)
    # In fp8, entries of a rotation of 512 x 512 become subnormal.
    words = [f"python -m sglang.launch_server --model-path {model} --kv-cache-dtype bfloat16"]
    if packed:  # other backends ask the pool for rows in the model's type, which it does not have
        words.append("--attention-backend triton")
    command = " ".join([*words, *options_of_hybrids(payload)])
    return Launch([command], environment, _notes(payload, packed))


def _notes(payload: Payload, packed: bool) -> list[str]:
    notes = [
        "needs OSCAR's SGLang; these files follow its own tools, and no server has read them here",
        "a layer without its file is served without rotation, and nothing says so",
        "requests that share a cached prefix may lose its exact tokens: --disable-radix-cache "
        "keeps them",
    ]
    if packed:
        notes.append(
            "SGLANG_LLOYD_MAX=1 takes Lloyd-Max levels, which its makers prefer and `evaluate` "
            "does not simulate"
        )
        notes.append(
            "triton attends to every token: a model with sparse attention (DSA, as GLM-5) keeps it "
            "without --attention-backend"
        )
    else:
        notes.append(f"stored unpacked: its makers ran packed latents of {_PACKED} elements alone")
    if payload.largest_group not in _GROUPS:
        groups = " and ".join(map(str, _GROUPS))
        notes.append(
            f"one scale for {payload.largest_group} channels; its makers measured {groups}"
        )
    return notes


def latent_files(folder: Path) -> list[Path]:
    """A folder's files by layer: matrices of latents, or tables with a mean and eigenvalues."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(each for each in files if _OF_A_LAYER.fullmatch(each.name))


def read_latents(folder: Path) -> RotationFile:
    """The rotations of latents in a folder. Raises `RotationZooError` as `read_pt` does."""
    entries: Entries = {}
    folder = folder.resolve()
    for path in latent_files(folder):
        layer = check_layer(path, path.stem.removeprefix("layer_"))
        if layer in entries:
            raise RotationZooError(f"{folder.name} has layer {layer} twice")
        entries |= load(path, layer)[1]
    tensors = tensors_of(folder, entries)
    tensors["mean"] = {layer: mean.flatten() for layer, mean in tensors["mean"].items()}
    content = SideMatrices(objective=folder.name, **tensors)
    return RotationFile(folder, "latents", LATENT, content)
