"""Test rows for validating a kernel.

Rows are drawn from an artifact's statistics, placed at the edges of the codec's domain, and
captured from the artifact's model.
"""

from collections.abc import Iterator

import torch

from rotationzoo.artifact.store import Artifact
from rotationzoo.codec import cuda, int2
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Average
from rotationzoo.model import loading
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.source import config_hash, fetch, find
from rotationzoo.recipe import Data
from rotationzoo.text.rows import read_corpus

EDGE_ROWS = 8
_TAIL_DEGREES = 3  # degrees of freedom of drawn rows' Student t: few of them make heavy tails
_CAPTURED_LENGTH = 1024  # the most tokens per row of captured text


def draw_rows(moments: Average | None, heads: int, count: int, dim: int, seed: int) -> torch.Tensor:
    """Random rows `[heads, count, dim]`, float32, with heavy tails.

    They have the mean `[H, D]` of `moments`. Around it they are multivariate Student t: normal with
    the covariance of `moments`, whose second moment is `[H, D, D]`, and each row scaled by a random
    factor of its own. Without `moments` the rows are standard normal, scaled likewise.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(heads, count, dim, generator=generator, dtype=torch.float64)
    degrees = torch.randn(heads, count, _TAIL_DEGREES, generator=generator, dtype=torch.float64)
    chi_squared = degrees.square().sum(-1, keepdim=True)
    tail = (_TAIL_DEGREES / chi_squared).sqrt()
    if moments is None:
        return (normal * tail).float()
    mean, second = moments.mean, moments.second_moment
    assert mean is not None, "keys and values of a calibration have a mean"
    eigenvalues, vectors = torch.linalg.eigh(second - mean.unsqueeze(-1) * mean.unsqueeze(-2))
    # Rounding can push eigenvalues of a singular covariance slightly below 0.
    root = vectors * eigenvalues.clamp(min=0).sqrt().unsqueeze(-2)
    rows: torch.Tensor = mean.unsqueeze(1) + tail * (normal @ root.mT)
    return rows.float()


def edge_rows(dim: int, largest: float) -> torch.Tensor:
    """Rows `[EDGE_ROWS, dim]` at the edges of the codec's domain, with magnitudes up to `largest`.

    They are: zero, constant, one spike, subnormal, the full range, constant at `largest`, a tiny
    range on a large offset, and the grid of the codes themselves.
    """
    rows = torch.zeros(EDGE_ROWS, dim)
    rows[1] = 0.37
    rows[2, dim // 3] = -5.0
    rows[3] = 1e-40 * torch.arange(dim)
    rows[4] = largest * torch.linspace(-1, 1, dim)
    rows[5] = largest
    rows[6] = 1000 + 1e-3 * torch.arange(dim)
    rows[7] = torch.arange(dim) % 4
    return rows


def rows_of_each_type(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Edge rows followed by the rows `[H, N, D]`, in every dtype that the kernel reads."""
    for dtype in cuda.TYPES:
        # Rounding to bfloat16 may add one part in 256, which must not leave the codec's domain.
        largest = min(int2.LARGEST, torch.finfo(dtype).max) * 0.99
        edges = edge_rows(rows.shape[-1], largest).expand(len(rows), -1, -1)
        yield torch.cat([edges, rows.clamp(-largest, largest)], dim=1).to(dtype)


def capture_rows(
    artifact: Artifact, model: str, revision: str | None, count: int, device: str
) -> dict[tuple[int, str], torch.Tensor]:
    """Post-RoPE keys and values `[H, count, D]` of a model on the bundled text, by layer and side.

    Raises `RotationZooError` if the model is not the artifact's.
    """
    source = find(model, revision)
    if config_hash(source) != artifact.manifest.model.config_sha256:
        raise RotationZooError(
            f"{artifact.folder} was not made for {model} but for {artifact.manifest.model.id}",
            hint="give the model that it was made for with --model",
        )
    config = loading.load_config(source, artifact.recipe.rope_scaling)
    fetch(source)
    target = loading.torch_device(device)
    dtype = loading.torch_dtype("auto", device, None)
    loaded = loading.load(source, config, target, dtype, predicts=False)
    data = Data(tokens=count, length=min(count, _CAPTURED_LENGTH))
    text = read_corpus(data, loading.load_tokenizer(source))
    captured: dict[tuple[int, str], list[torch.Tensor]] = {}

    def observe(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        for side, tensor in (("key", key), ("value", value)):
            by_head = tensor.float().cpu().transpose(0, 1).flatten(1, 2)
            captured.setdefault((layer, side), []).append(by_head)

    with torch.no_grad(), capture(loaded, observe):
        for ids in text.batches(1):
            decoder(loaded)(input_ids=ids.to(target), use_cache=False)
    return {place: torch.cat(parts, dim=1) for place, parts in captured.items()}
