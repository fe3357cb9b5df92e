"""How many rows a forward pass gets where weights are spread over devices: as many as fit, because
every pass fetches the weights that are kept elsewhere again."""

from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rotationzoo.artifact.store import MANIFEST
from rotationzoo.calibration.checkpoint import checkpoint_files
from rotationzoo.calibration.memory import Footprint
from rotationzoo.model.files import read_json
from rotationzoo.model.placement import USABLE, Limits, devices_of, free_memory
from rotationzoo.recipe import Data
from rotationzoo.storage import strict_json

SIZED = 0
"""The batch of a job that leaves the number of rows to `choose_batch`."""


def choose_batch(needs: Footprint, weights: int, limits: Limits | None) -> int:
    """The rows of a pass: all of them if their activations fit, else even parts, as few as fit.

    * `weights`: bytes of all weights once they are loaded;
    * `limits`: how much of them each device may hold. Without limits, `placement` keeps weights off
      a device for the sake of the activations, which get half of what is free there.
    """
    rooms = []
    for device in devices_of(on_cpu=needs.on_cpu):
        usable = int(USABLE * free_memory(device))
        if limits is None:
            rooms.append(max(usable - weights, usable // 2))
        else:
            rooms.append(usable - min(weights, limits.get(device, 0)))
    rows = _row_count(needs.recipe.data)
    fitting = bisect_right(range(1, rows + 1), min(rooms), key=needs.pass_bytes)
    passes = -(-rows // max(fitting, 1))
    return -(-rows // passes)


def earlier_batch(checkpoint: Path, output: Path) -> int | None:
    """The batch of the run whose checkpoint or artifact is there, or None.

    A sum can only be continued with batches of the same rows, and what is free changes from run to
    run. Whether the run was of the same job is checked elsewhere.
    """
    identities: list[Any] = [read_json(output / MANIFEST).get("identity")]
    for path in checkpoint_files(checkpoint):
        # No checkpoint, or a damaged one, which is refused when it is read.
        with suppress(Exception), safe_open(path, "pt") as file:
            identities.insert(0, strict_json.parse(file.metadata()["identity"], str(path)))
    for identity in identities:
        batch = identity.get("batch") if isinstance(identity, dict) else None
        if isinstance(batch, str) and batch.isdecimal() and int(batch) > 0:
            return int(batch)
    return None


def _row_count(data: Data) -> int:
    """How many rows of the longest kind there are; of documents of unknown lengths, at most as many
    as would be that long."""
    return max(1, data.tokens // data.length)
