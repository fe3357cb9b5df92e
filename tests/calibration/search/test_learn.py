"""Learning rotations: the loss falls where errors count."""

import time

import torch

from rotationzoo.calibration.search import learn
from rotationzoo.calibration.search.learn import LearningSettings, StoredRows, learn_rotations
from rotationzoo.calibration.search.straight_through import straight_through
from rotationzoo.codec import int2
from rotationzoo.linalg.compositions import data_free, orthogonality_error


def plain_rows(rows: torch.Tensor) -> StoredRows:
    """Rows `[H, N, D]` as they are stored, without a mean to subtract."""
    return StoredRows(rows.transpose(0, 1), torch.zeros(rows.shape[0], rows.shape[2]))


def test_learning_turns_towards_what_is_stored_better():
    """Rows in which one channel towers: turned so that it is spread, they come back far better."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 256, 16, generator=generator)
    rows[..., 0] = 40 * rows[..., 0].sign()
    metric = torch.eye(16, dtype=torch.float64).expand(2, -1, -1)
    matrices = torch.stack([torch.eye(16), data_free(16, "random", 0).float()])
    start = matrices[:, None].expand(-1, 2, -1, -1).contiguous()
    clip = torch.ones(2, 2, 1, dtype=torch.float64)

    def codec(rotated: torch.Tensor) -> torch.Tensor:
        return straight_through(rotated, clip, None, int2.SGLANG)

    def error(matrix: torch.Tensor) -> torch.Tensor:
        restored = codec(rows @ matrix) @ matrix.mT
        return (restored - rows).square().sum((1, 2, 3)) / rows.square().sum()

    settings = LearningSettings(steps=80, rate=0.03)
    stored = [plain_rows(rows)]
    learned, curve = learn_rotations(stored, metric, start, codec, settings)
    assert (len(curve), len(curve[0])) == (80, 2)
    assert error(learned)[0] < 0.5 * error(start)[0]
    assert error(learned)[1] < error(start)[1]
    assert orthogonality_error(learned) < 1e-6
    again, _ = learn_rotations(stored, metric, start, codec, settings)
    assert torch.equal(again, learned), "the same seed, the same rotation"
    out_of_time = LearningSettings(steps=80, rate=0.03, deadline=time.monotonic() - 1)
    late, none = learn_rotations(stored, metric, start, codec, out_of_time)
    assert len(none) == 0
    assert torch.allclose(late, start, atol=1e-6)


def test_learning_follows_the_metric():
    """What nobody reads may come back wrong: its error stays where that of the rest falls."""
    rows = torch.randn(1, 512, 16, generator=torch.Generator().manual_seed(0))
    rows *= torch.linspace(1, 4, 16)
    read = torch.ones(16, dtype=torch.float64)
    read[8:] = 1e-4
    start = data_free(16, "hadamard", 0).float()[None, None].contiguous()
    clip = torch.full((1, 1, 1), 0.9, dtype=torch.float64)

    def codec(rotated: torch.Tensor) -> torch.Tensor:
        return straight_through(rotated, clip, None, int2.SGLANG)

    def errors(matrix: torch.Tensor) -> torch.Tensor:
        return (codec(rows @ matrix) @ matrix.mT - rows).square().mean((0, 1, 2))

    settings = LearningSettings(steps=200, rate=0.02)
    learned, curve = learn_rotations(
        [plain_rows(rows)], torch.diag(read)[None], start, codec, settings
    )
    read_share, other_share = (errors(learned) / errors(start)).view(2, 8).mean(1).tolist()
    assert read_share < 0.8  # measured 0.70
    assert other_share > read_share + 0.1  # measured 0.89 to 0.95
    assert curve[-1][0] < 0.8 * curve[0][0]


def test_a_step_turns_and_does_not_stretch():
    """The Cayley transform of a skew-symmetric matrix is orthogonal, and the exponential to second
    order."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 16, 16, generator=generator) * 1e-2
    skew = drawn - drawn.mT
    step = learn._cayley(skew)
    assert orthogonality_error(step) < 1e-6  # measured 2e-7
    third_order = torch.linalg.matrix_norm(skew, 2) ** 3
    assert (torch.linalg.matrix_norm(step - torch.matrix_exp(skew), 2) < third_order).all()


def test_the_nearest_orthogonal_matrix_is_the_polar_factor():
    generator = torch.Generator().manual_seed(0)
    rotation = torch.stack([data_free(16, "random", seed).float() for seed in range(3)])
    drifted = rotation + 1e-4 * torch.randn(rotation.shape, generator=generator)
    left, _, right = torch.linalg.svd(drifted.double())
    nearest = learn._nearest_orthogonal(drifted)
    assert torch.equal(nearest, (left @ right).float())
    assert not torch.allclose(nearest, drifted, atol=1e-5)


def test_heads_of_other_layers_change_nothing():
    """Layers that are learned together, each with a mean and an equalizer of its own."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    layers = [
        StoredRows(draw(64, 2, 16).bfloat16(), draw(2, 16), equalizer)
        for equalizer in (None, 1 + draw(2, 16).abs(), draw(2, 16, 16))
    ]
    wide = draw(6, 16, 32).double()
    metric = wide @ wide.mT
    starts = torch.stack([data_free(16, "random", seed).float() for seed in range(12)])
    start = starts.view(2, 6, 16, 16)
    settings = LearningSettings(steps=5, rate=0.02)

    def learned(layers: list[StoredRows], heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = start[:, heads].contiguous()
        clip = torch.full((2, part.shape[1], 1), 0.9, dtype=torch.float64)
        codec = lambda rows: straight_through(rows, clip, None, int2.SGLANG)  # noqa: E731
        return learn_rotations(layers, metric[heads], part, codec, settings)

    together, losses = learned(layers, slice(None))
    for number, layer in enumerate(layers):
        heads = slice(2 * number, 2 * number + 2)
        alone, curve = learned([layer], heads)
        assert torch.allclose(together[:, heads], alone, atol=1e-6)
        assert torch.allclose(losses[:, :, heads], curve, rtol=1e-5)
        assert not torch.allclose(alone, start[:, heads], atol=1e-2)
