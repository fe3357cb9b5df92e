"""Recipes with error feedback: the factor of the metric in which queries read errors of keys."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.jobs import SMALL, job, rotation_bytes
from support.models import save_tiny

from rotationzoo.artifact.layout import expected_layout, rotation_tensors
from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.artifact.spectra import summarize
from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.arm import Arm
from rotationzoo.calibration.claim import Claim
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.key_feedback import add_factors
from rotationzoo.calibration.peaked_queries import EVERY_QUERY
from rotationzoo.calibration.plan import plan
from rotationzoo.calibration.soundness import check
from rotationzoo.checks.verify import verify
from rotationzoo.codec import int2
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.error_feedback import DAMPING
from rotationzoo.linalg.moments import sums
from rotationzoo.model import loading
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.source import find
from rotationzoo.recipe import PRESETS, Recipe
from rotationzoo.text.rows import read_corpus

WINDOWS = {"sink": 4, "recent": 6}
RECIPE = PRESETS["feedback"].model_copy(update={"data": SMALL, **WINDOWS})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a tiny model with queries that point in few directions."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    weights = load_file(folder / "model.safetensors")
    for layer in (0, 1):
        projection = weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
        projection *= torch.linspace(0, -4, 16).exp().repeat(4)[:, None]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory) -> Artifact:
    """An artifact of the recipe `feedback`, which no test may change."""
    return calibrate(job(folder, tmp_path_factory.mktemp("feedback"), RECIPE))


@pytest.fixture(scope="module")
def captured(folder):
    """Layer -> all queries `[query heads, N, D]` and keys `[KV heads, N, D]` of the text, and how
    peaked the attention of each query is, `[query heads, N]`."""
    source = find(str(folder))
    text = read_corpus(SMALL, loading.load_tokenizer(source))
    model = loading.load(source, loading.load_config(source), "cpu", torch.float32)
    queries, keys, peaked = {}, {}, {}

    def observe(layer, query, key, value, output):
        queries.setdefault(layer, []).append(query.transpose(0, 1).flatten(1, 2))
        keys.setdefault(layer, []).append(key.transpose(0, 1).flatten(1, 2))
        scores = query.double() @ key.double().repeat_interleave(2, 1).mT / 16**0.5
        later = torch.ones_like(scores).triu(1).bool()
        softmax = scores.masked_fill(later, -torch.inf).softmax(-1)
        # Only keys that are quantized count: behind the sink and before the recent tokens.
        read = softmax.tril(-WINDOWS["recent"])[..., WINDOWS["sink"] :]
        weights = read.square().sum(-1).square() + EVERY_QUERY
        peaked.setdefault(layer, []).append(weights.transpose(0, 1).flatten(1))

    with torch.no_grad(), capture(model, observe):
        for rows in text.batches(4):
            decoder(model)(input_ids=rows, use_cache=False)
    captured = zip(queries.values(), keys.values(), peaked.values(), strict=True)
    joined = (tuple(torch.cat(parts, 1) for parts in layer) for layer in captured)
    return dict(zip(queries, joined, strict=True))


def multiply_back(factor: torch.Tensor) -> torch.Tensor:
    """`U diag(d) U^T`."""
    factor = factor.double()
    unit = factor.triu(1) + torch.eye(factor.shape[-1])
    return unit @ torch.diag_embed(factor.diagonal(dim1=-2, dim2=-1)) @ unit.mT


@pytest.mark.parametrize("equalize", [True, False])
@pytest.mark.parametrize("pooling", ["head", "layer"])
def test_a_factor_is_that_of_how_captured_queries_read_errors(made, captured, pooling, equalize):
    """The weighted mean square of `e @ inverse @ q^T`, for the unit errors e and the queries of
    each KV head."""
    changes = {"pooling": pooling, "equalize": equalize}
    rotations = fit(sums(made.statistics), RECIPE.model_copy(update=changes), made.geometry)
    for layer, sides in rotations.items():
        queries = captured[layer][0].double().unflatten(0, (2, -1)).flatten(1, 2)
        weights = captured[layer][2].unflatten(0, (2, -1)).flatten(1, 2)[..., None]
        read = queries @ sides.key.inverse.double().mT  # what each query reads in each channel
        metric = read.mT @ (weights * read) / weights.sum(1, keepdim=True)
        scaled = metric / metric.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
        expected = scaled + DAMPING * torch.eye(16)
        assert sides.key.feedback.shape == (2, 16, 16)
        assert sides.value.feedback is None
        # Measured 1.3e-7: factors are stored in float32.
        assert torch.allclose(multiply_back(sides.key.feedback), expected, atol=1e-6)
        assert not torch.allclose(expected[0], expected[1], atol=1e-2), "each head has its own"


@pytest.mark.parametrize("name", int2.FORMATS)
@pytest.mark.parametrize("group", [None, 8])
def test_queries_read_smaller_errors_of_keys(made, captured, name, group):
    nearest = Arm("nearest", made.rotations, group)
    feedback = replace(nearest, name="feedback", rounding="feedback")
    errors = {}
    for arm in (nearest, feedback):
        total = 0.0
        for layer, (queries, keys, peaked) in captured.items():
            keys = keys[:, ::8]
            restored = arm.fake_quantize(keys[None], layer, "key", int2.FORMATS[name])[0]
            exact = arm.keep_exact(keys[None], layer, "key")[0]
            by_head = queries.unflatten(0, (2, -1)).flatten(1, 2)
            weights = peaked.unflatten(0, (2, -1)).flatten(1, 2)[:, None]
            total += (((restored - exact) @ by_head.mT).square() * weights).mean().item()
        errors[arm.name] = total
    # Measured .38 to .42 for whole rows and .52 for groups of 8.
    assert errors["feedback"] < 0.75 * errors["nearest"]
    values = torch.randn(1, 2, 8, 16)
    same = (arm.fake_quantize(values, 0, "value", int2.SGLANG) for arm in (nearest, feedback))
    assert torch.equal(*same)


def test_an_artifact_with_factors_round_trips_and_verifies(made):
    assert verify(made).problems == []
    tensors = made.rotation_tensors()
    assert tensors["layers.1.key.feedback"].dtype == torch.float32
    assert "layers.1.value.feedback" not in tensors
    assert made.rotations.has_feedback
    again = fit(sums(made.statistics), made.recipe, made.geometry)
    for layer, sides in again.items():
        # Measured 0.
        assert torch.allclose(
            sides.key.feedback, tensors[f"layers.{layer}.key.feedback"], atol=1e-5
        )


def test_an_artifact_without_factors_has_the_tensors_that_it_had(folder, tmp_path):
    plain = calibrate(job(folder, tmp_path / "plain", Recipe(data=SMALL)))
    assert not plain.rotations.has_feedback
    assert not any("feedback" in name for name in plain.rotation_tensors())
    assert "feedback" not in plain.content["recipe"]
    with pytest.raises(RotationZooError, match="no factors to choose key codes") as refused:
        Arm("plain", plain.rotations, rounding="feedback")
    assert refused.value.hint == "calibrate with --feedback"


def test_factors_are_shown_and_described(made, inside):
    shown = inside("inspect", made.folder)
    assert "Error feedback: of the squared errors that nearest codes of keys make" in shown.stdout
    centred = "Centred: keys lose the mean of their KV head" in shown.stdout
    assert centred == made.recipe.center_keys
    layer = summarize(made)[0]
    # What is left in theory; the test above measures it on keys.
    assert 0.1 < layer.key.feedback < 0.9
    assert layer.value.feedback is None
    card = (made.folder / "README.md").read_text()
    assert "`layers.N.key.feedback` (`[KV heads, D, D]`)" in card


def test_data_free_rotations_get_factors_from_a_text(folder, tmp_path, inside):
    recipe = PRESETS["hadamard"].model_copy(update={"feedback": True, "data": SMALL})
    assert recipe.needs_statistics
    artifact = calibrate(job(folder, tmp_path / "hadamard", recipe))
    assert verify(artifact).problems == []
    assert artifact.rotations.has_feedback
    with pytest.raises(RotationZooError, match="needs statistics"):
        fit(None, recipe, artifact.geometry)
    done = inside("export", artifact.folder, "--to", "sglang", "--output", "exported", "--pooled")
    assert done.returncode == 0, done.stderr
    files = [path for path in (inside.folder / "exported").iterdir() if path.is_file()]
    assert not any(b"feedback" in path.read_bytes() for path in files if path.suffix == ".pt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda factor: factor * 1.01, "key feedback not that of the statistics"),
        (lambda factor: factor.mT, "key feedback not upper triangular"),
        (lambda factor: -factor, "key feedback without a positive diagonal"),
        (lambda factor: factor.flip(0), "key feedback not that of the statistics"),
        (lambda factor: factor.double(), "key feedback of another shape or type"),
        (lambda factor: None, "key feedback missing"),
    ],
)
def test_a_changed_factor_is_reported(made, change, words):
    def damage(layer, side, rotation):
        if (layer, side) != (1, "key"):
            return rotation
        return replace(rotation, feedback=change(rotation.feedback))

    problems = check(made.rotations.replace(damage), made.statistics, made.content).problems
    assert len(problems) == 1
    assert problems[0].startswith(words)
    assert problems[0].endswith("layer 1")


def test_a_factor_of_another_rotation_is_reported(made):
    """Whatever made the rotation: a search that chose by head leaves no formula to check."""
    turned = made.rotations.replace(
        lambda layer, side, rotation: replace(rotation, matrix=rotation.matrix.flip(-2))
    )
    claim = replace(Claim.from_manifest(made.content), by_head=True)
    assert claim.factor_problems(turned, made.statistics)
    again = add_factors(turned, made.statistics, made.recipe)
    assert claim.factor_problems(again, made.statistics) == []


def test_what_is_planned_is_what_is_written(made, folder, tmp_path):
    planned = plan(job(folder, tmp_path, RECIPE))
    without = plan(job(folder, tmp_path, RECIPE.model_copy(update={"feedback": False})))
    layout = expected_layout(ROTATIONS, made.recipe, made.geometry, False)
    assert layout.shapes["layers.0.key.feedback"] == (torch.float32, (2, 16, 16))
    factors = [tensor for name, tensor in rotation_tensors(made.rotations).items()
               if name.endswith("feedback")]  # fmt: skip
    factor_bytes = sum(factor.nbytes for factor in factors)
    moments = [kinds["peaked_query"].second_moment for kinds in made.statistics.values()]
    moment_bytes = sum(moment.nbytes for moment in moments)
    assert planned.artifact_bytes - without.artifact_bytes == factor_bytes + moment_bytes
    assert len(rotation_bytes(made)) > factor_bytes
