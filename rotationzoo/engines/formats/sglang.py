"""SGLang with the 2-bit cache: OSCAR's own server and its pull request to SGLang.

A pair of `.pt` files, found by two environment variables. A server that reads a pair holds a shared
lock; who replaces one holds it alone (`srt/mem_cache/oscar_rotation_paths.py` there). Its markers
of a pair that is half written are needed by who replaces file by file; here the folder of the pair
is replaced whole.
"""

import hashlib
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rotationzoo.engines.base import Capabilities, Launch, Options, Payload, number, power_of_two
from rotationzoo.engines.formats import oscar_pt
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.storage.locks import locked

NAME = "sglang"
CAPABILITIES = Capabilities(heads=True, mean=True, clip="side", windows=True)
_PAGE = 8  # tokens that leave the exact window at a time


def check(geometry: Geometry, serving: Payload) -> None:
    """Raise `RotationZooError` for what its kernels cannot run."""
    power_of_two("SGLang", geometry)
    if serving.group & (serving.group - 1):
        raise RotationZooError(
            f"SGLang cannot run quantization groups of {serving.group}: only powers of two"
        )
    for name, tokens in (("sink", serving.sink), ("recent", serving.recent)):
        if tokens % _PAGE:
            raise RotationZooError(
                f"SGLang cannot keep {tokens} {name} tokens exact: only multiples of {_PAGE}",
                hint="add: --windows 64/256",
            )


def write(work: Path, final: Path, serving: Payload, options: Options) -> Launch:
    """Write the pair to `work`; the launch line names it in `final`."""
    key, value = oscar_pt.write_pair(work, serving)
    dims = {
        dim for layer in cached_layers(serving.geometry) for dim in (layer.key_dim, layer.value_dim)
    }
    # Left out, the whole head of each layer is one group.
    group = (
        f" --kv-cache-quant-group-size {serving.group}"
        if serving.group_size or len(dims) == 1
        else ""
    )
    command = [
        f"python -m sglang.launch_server --model-path {shlex.quote(serving.model or 'MODEL')} --kv-cache-dtype int2"
        f"{group} --page-size {_PAGE} --prefill-attention-backend triton --decode-attention-backend triton"
    ]
    notes = ["needs OSCAR's SGLang, or a SGLang with pull request 32129"]
    if len(cached_layers(serving.geometry)) < max(layer.index for layer in serving.geometry) + 1:
        command[0] += " --mamba-radix-cache-strategy extra_buffer"
        notes.append("only some layers of this model cache keys: their numbers count all layers")
    if serving.group < max(dims):
        notes.append(
            f"{max(dims) // serving.group} groups a head: the server's prefill with more than one is unverified; compare its "
            "answers with those of one group a head first"
        )
    if serving.key.mean:
        notes.append(
            "the key mean (version 3) needs the server of August 2026 or later; earlier ones ignore it"
        )
    key_clip, value_clip = serving.clip
    environment = {
        "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
        "SGLANG_OSCAR_K_ROTATION_PATH": str(final / key),
        "SGLANG_OSCAR_V_ROTATION_PATH": str(final / value),
        "SGLANG_OSCAR_K_CLIP_RATIO": number(key_clip, off=0),
        "SGLANG_OSCAR_V_CLIP_RATIO": number(value_clip, off=0),
        "SGLANG_MIXED_KV_PREFIX_TOKENS": str(serving.sink),
        "SGLANG_MIXED_KV_RECENT_TOKENS": str(serving.recent),
        "SGLANG_MIXED_KV_HP_DTYPE": "bfloat16",
        "SGLANG_MIXED_KV_SCALE_DTYPE": "float32",
    }
    return Launch(command, environment, notes)


@contextmanager
def alone(environment: dict[str, str]) -> Iterator[None]:
    """Hold the pair's lock alone while the folder of its files is replaced, so that no server reads
    one side of each.

    Raises `RotationZooError` where a server keeps it for longer than locks are waited for.
    """
    key, value = (
        Path(environment[f"SGLANG_OSCAR_{letter}_ROTATION_PATH"]) for letter in ("K", "V")
    )
    pair, _, _ = markers(key, value)
    locks = Path(
        os.environ.get("SGLANG_OSCAR_CALIBRATION_LOCK_DIR")
        or Path(tempfile.gettempdir()) / "sglang-oscar-locks"
    )
    with locked(
        locks / f"oscar_{pair}.lock",
        f"reading or writing {key.parent} (an SGLang server)",
        kept=True,
    ):
        yield


def old_markers(folder: Path) -> list[str]:
    """Names of what says of earlier pairs in a folder that they are half written, or whole."""
    return [path.name for path in folder.glob(".oscar_*.json")]


def markers(key: Path, value: Path) -> tuple[str, Path, Path]:
    """A pair's id, and the files that say that it is half written, or whole, as the server computes
    them."""
    paths = [os.path.realpath(path) for path in (key, value)]
    pair = hashlib.sha256(f"K={paths[0]}\0V={paths[1]}".encode()).hexdigest()[:16]
    pending, complete = (
        Path(paths[0]).parent / f".oscar_{pair}.{state}.json" for state in ("pending", "complete")
    )
    return pair, pending, complete
