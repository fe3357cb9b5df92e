"""Rows to learn from."""

import torch
from support import architectures
from support.searches import ROWS

from rotationzoo.calibration.search.sampling import sample_rows
from rotationzoo.model.capture import capture


def test_rows_to_learn_from_are_the_models_own():
    model = architectures.build("llama")
    seen = {}
    with (
        capture(
            model, lambda layer, query, key, value, output: seen.setdefault(layer, (key, value))
        ),
        torch.no_grad(),
    ):
        model(input_ids=ROWS[0][None])
    sampled = sample_rows(model, ROWS[:2], sink=4, layers={1}, count=100)
    assert set(sampled) == {1}
    for rows, whole in zip(sampled[1], seen[1], strict=True):
        assert rows.shape[1] == 2 * 36
        assert torch.equal(rows[:, :36], whole[0][:, 4:])
    few = sample_rows(model, ROWS[:2], sink=4, layers={1}, count=10)[1][0]
    assert few.shape[1] == 20
