"""Candidates in closed form."""

import torch

from rotationzoo.calibration.search.closed_forms import bases, closed_forms
from rotationzoo.codec import int2
from rotationzoo.linalg.compositions import data_free, orthogonality_error


def test_candidates_are_what_they_are_called():
    generator = torch.Generator().manual_seed(0)
    stored, read = (
        torch.randn(2, 16, 40, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    stored, read = stored @ stored.mT, read @ read.mT
    by_name = bases(stored, read)
    for name, matrix in (("stored", stored), ("read", read)):
        rotated = by_name[name].mT @ matrix @ by_name[name]
        diagonal = torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
        assert torch.allclose(rotated, diagonal, atol=1e-9)
    ratio = (stored.diagonal(dim1=-2, dim2=-1) / read.diagonal(dim1=-2, dim2=-1))[1]
    assert torch.equal(by_name["channels"][1].argmax(0), ratio.argsort())
    candidates = closed_forms(stored, read)
    assert list(candidates)[:4] == ["hadamard", "read h1", "read h4", "read h8"]
    assert torch.equal(candidates["read h1"], by_name["read"])
    assert torch.equal(candidates["hadamard"][1], data_free(16, "hadamard", 0))
    assert max(orthogonality_error(matrix) for matrix in candidates.values()) < 1e-12
    eye = torch.eye(20, dtype=torch.float64)[None]
    widths = {name.split(" h")[1] for name in closed_forms(eye, eye) if " h" in name}
    assert widths == {"1", "4", "20"}


def test_a_scale_that_no_rotation_undoes_is_left_alone():
    """Where channels are stored and read at opposite scales, mixing what is alike loses far less
    than mixing everything."""
    scale = torch.exp(torch.linspace(-1, 1, 32, dtype=torch.float64))
    stored, read = torch.diag(scale**2)[None], torch.diag(scale**-2)[None]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 4000, 32, generator=generator, dtype=torch.float64) * scale

    def loss(matrix: torch.Tensor) -> float:
        """At the clip ratio that suits the matrix."""
        losses = []
        for ratio in (0.6, 0.7, 0.8, 0.9):
            restored = int2.round_trip((rows @ matrix).float(), ratio).double() @ matrix.mT
            losses.append(((restored - rows) / scale).square().sum(-1).mean().item())
        return min(losses)

    losses = {name: loss(matrix) for name, matrix in closed_forms(stored, read).items()}
    assert losses["joint h4"] < 0.87 * losses["hadamard"]  # measured 0.81
