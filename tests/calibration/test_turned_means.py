"""Recipes with turned means: keys are stored without what they share before RoPE."""

from dataclasses import replace

import pytest
import torch
from support.jobs import job
from support.models import attention_calls, load_saved, load_tokenizer, save_family
from support.recipes import QUICK
from typer.testing import CliRunner

from rotationzoo.artifact.pooling import reduced_rotations
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.checks.verify import verify
from rotationzoo.cli.app import app
from rotationzoo.codec.engines import ENGINES
from rotationzoo.engines.reductions import describe_choice
from rotationzoo.linalg.moments import TURNED, sums
from rotationzoo.model.turning import turn_means
from rotationzoo.recipe import Data, Recipe
from rotationzoo.text.rows import read_corpus

TEXT = Data(tokens=4096, length=512)
RECIPE = QUICK.model_copy(update={"data": TEXT, "turn_key_mean": True})


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Artifact:
    """An artifact of the demo model, which no test may change."""
    return calibrate(job("demo", tmp_path_factory.mktemp("turned"), RECIPE))


@pytest.fixture(scope="module")
def keys() -> dict[int, torch.Tensor]:
    """Layer -> the keys `[H, rows, T, D]` past the sink."""
    rows = torch.stack(list(read_corpus(TEXT, load_tokenizer("demo")).rows))
    calls = attention_calls(load_saved("demo"), [rows])
    return {
        layer: key[:, :, RECIPE.sink :].transpose(0, 1).double()
        for layer, [(_, key, _, _)] in calls.items()
    }


def test_keys_vary_less_about_their_turned_mean(made, keys):
    for layer, key in keys.items():
        rotation = made.rotations[layer].key
        varying = key - rotation.mean[:, None, None]
        turned = rotation.turned_rows(RECIPE.sink, TEXT.length)[:, None]
        about = (varying - turned).flatten(1, 2)
        # .22 to .85 was measured.
        assert about.square().sum() < 0.9 * varying.square().sum()
        assert turned.mean(2).abs().max() < 1e-5 * turned.abs().max()
        # Whitening takes keys before RoPE to depend on no position: .11 was measured.
        moment = about.mT @ about / about.shape[1]
        stored = made.statistics[layer][TURNED].second_moment
        assert (moment - stored).norm() < 0.3 * moment.norm()


def test_an_artifact_with_turned_means_is_sound(made):
    assert verify(made).ok
    assert made.recipe.turn_key_mean
    assert "turn_key_mean" not in Recipe().published()
    without = reduced_rotations(made, False, ENGINES["sglang"].uncentered)
    kept = reduced_rotations(made, False, ENGINES["transformers"].uncentered)
    shown = CliRunner().invoke(app, ["inspect", str(made.folder)])
    assert "Turned mean: keys lose their mean before RoPE" in shown.stdout
    assert "keys' turned mean" in describe_choice("vllm", [made])
    assert describe_choice("transformers", [made]).endswith("Lost: nothing")
    for layer, rotations in made.rotations.items():
        assert rotations.value.turned_mean is None
        assert without[layer].key.turned_mean is None
        assert torch.equal(without[layer].key.mean, rotations.key.mean)
        assert torch.equal(kept[layer].key.turned_mean, rotations.key.turned_mean)


def test_a_layer_whose_keys_vary_more_keeps_its_mean_alone(made):
    statistics = sums(made.statistics)
    for moments in statistics.values():
        moments[TURNED] = replace(moments["key"], second=2 * moments["key"].second)
    geometry = made.geometry
    found, means = turn_means(statistics, geometry, {}, RECIPE)
    for layer, (turned, frequencies) in means.items():
        assert not turned.any()
        assert not frequencies.any()
        plain = statistics[layer]["key"]
        centered = plain.second_moment - plain.mean[:, :, None] * plain.mean[:, None]
        torch.testing.assert_close(found[layer][TURNED].second_moment, centered)


def test_keys_that_must_keep_their_mean_have_no_turned_one(tmp_path):
    folder = save_family("gemma2", tmp_path / "gemma2")
    short = {"sink": 8, "recent": 8, "data": Data(tokens=1024, length=512)}
    artifact = calibrate(job(folder, tmp_path, RECIPE.model_copy(update=short)))
    assert not artifact.recipe.center_keys
    assert all(rotations.key.turned_mean is None for rotations in artifact.rotations.values())
