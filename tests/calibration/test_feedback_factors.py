"""Recipes with error feedback: the factors of the metrics in which errors of rows count."""

from dataclasses import replace

import pytest
import torch
from support.jobs import SMALL, job
from support.models import attention_calls, edited_weights, load_saved, load_tokenizer, save_tiny
from support.recipes import QUICK

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.soundness import check
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.error_feedback import DAMPING
from rotationzoo.linalg.moments import sums
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import SIDES
from rotationzoo.text.rows import read_corpus

RECIPE = QUICK.model_copy(update={"data": SMALL, "sink": 4, "recent": 6})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model with queries that point in few directions."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    with edited_weights(folder) as weights:
        for layer in (0, 1):
            projection = weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
            projection *= torch.linspace(0, -4, 16).exp().repeat(4)[:, None]
    return folder


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory) -> Artifact:
    """An artifact of the recipe `oscar`, which no test may change."""
    return calibrate(job(folder, tmp_path_factory.mktemp("feedback"), RECIPE))


@pytest.fixture(scope="module")
def captured(folder):
    """Layer -> side -> the stored rows `[KV heads, N, D]`, and those in whose second moment their
    errors count: queries or outputs `[query heads, N, D]`."""
    text = read_corpus(SMALL, load_tokenizer(folder))
    layers = {}
    for layer, calls in attention_calls(load_saved(folder), text.batches(4)).items():
        query, key, value, output = (
            torch.cat([rows.transpose(0, 1).flatten(1, 2) for rows in batches], 1)
            for batches in zip(*calls, strict=True)
        )
        layers[layer] = {"key": (key, query), "value": (value, output)}
    return layers


def multiply_back(factor: torch.Tensor) -> torch.Tensor:
    """`U diag(d) U^T`."""
    factor = factor.double()
    unit = factor.triu(1) + torch.eye(factor.shape[-1])
    return unit @ torch.diag_embed(factor.diagonal(dim1=-2, dim2=-1)) @ unit.mT


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pooling", ["head", "layer"])
def test_a_factor_is_that_of_captured_rows(made, captured, pooling, side):
    """The mean square of `e @ T^-1 @ c^T`, for the unit errors e and the queries or outputs c of
    each KV head; T is the whitening times the rotation."""
    recipe = RECIPE.model_copy(update={"pooling": pooling})
    rotations = fit(sums(made.statistics), recipe, made.geometry)
    for layer, sides in rotations.items():
        weighting = captured[layer][side][1].double().unflatten(0, (2, -1)).flatten(1, 2)
        turned = sides[side].whitening.double() @ sides[side].matrix.double()
        read = weighting @ torch.linalg.inv(turned).mT
        metric = read.mT @ read / read.shape[1]
        scaled = metric / metric.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        expected = scaled + DAMPING * torch.eye(16)
        assert sides[side].feedback.shape == (2, 16, 16)
        # Factors are stored in float32: eps times a few sums of 16 products of entries up to 10.
        assert torch.allclose(multiply_back(sides[side].feedback), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(expected[0], expected[1], atol=1e-2), "each head has its own"


def test_data_free_rotations_get_factors_from_a_text(folder, tmp_path):
    recipe = PRESETS["hadamard"].model_copy(update={"feedback": True, "data": SMALL})
    assert recipe.needs_statistics
    artifact = calibrate(job(folder, tmp_path / "hadamard", recipe))
    assert verify(artifact).problems == []
    assert artifact.rotations.has_feedback
    with pytest.raises(RotationZooError, match="needs statistics"):
        fit(None, recipe, artifact.geometry)


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        ("feedback", lambda factor: factor * 1.01, "key feedback not that of the statistics"),
        ("feedback", lambda factor: factor.mT, "key feedback not upper triangular"),
        ("feedback", lambda factor: -factor, "key feedback without a positive diagonal"),
        ("feedback", lambda factor: factor.flip(0), "key feedback not that of the statistics"),
        ("feedback", lambda factor: factor.double(), "key feedback of another shape or type"),
        ("feedback", lambda factor: None, "key feedback missing"),
        ("whitening", lambda whitening: whitening * 1.01, "key whitening not that of"),
    ],
)
def test_a_changed_factor_or_whitening_is_reported(made, field, change, words):
    def damage(layer, side, rotation):
        if (layer, side) != (1, "key"):
            return rotation
        return replace(rotation, **{field: change(getattr(rotation, field))})

    problems = check(made.rotations.replace(damage), made.statistics, made.content).problems
    assert len(problems) == 1
    assert problems[0].startswith(words)
    assert problems[0].endswith("layer 1")
