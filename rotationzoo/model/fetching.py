"""Fetching a model's weights, which may take hours, and telling how many bytes have arrived."""

from collections.abc import Iterable
from pathlib import Path

from rotationzoo.model.files import read_json
from rotationzoo.model.source import Source, fetch, has_weights
from rotationzoo.progress import Progress
from rotationzoo.storage.growth import size_of_all, tell_growth

_STAGE = "fetching the weights"
_INDEX = "model.safetensors.index.json"


def fetch_weights(source: Source, progress: Progress) -> None:
    """Fetch a model's weights unless they are on this machine. Raises `ModelUnavailable`.

    Bytes are told where the index of the weights says how many there are: that is fetched with the
    tokenizer, and models of a single file have none.
    """
    metadata = read_json(source.folder / _INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if source.revision is None or not isinstance(total, int) or total <= 0 or has_weights(source):
        progress(_STAGE, 0, 0)
        fetch(source)
        return
    with tell_growth(lambda: size_of_all(_arrived(source.folder)), _STAGE, total, progress):
        fetch(source)


def _arrived(snapshot: Path) -> Iterable[Path]:
    """The files of a download so far: whole ones are in the snapshot's folder, as links, and the
    hub's client names others `.incomplete` beside those that the links lead to."""
    yield from snapshot.glob("*.safetensors")
    yield from (snapshot.parent.parent / "blobs").glob("*.incomplete")
