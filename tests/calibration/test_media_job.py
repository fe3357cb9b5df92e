"""`calibrate` on rows with images, from the command line to the artifact, and what it refuses
before weights are read."""

import json
import shutil
from pathlib import Path

import pytest
from support import media
from support.command_line import refused

from rotationzoo import Artifact
from rotationzoo.recipe import Data, Recipe
from rotationzoo.recipe.loading import from_dict
from rotationzoo.report.page import make_report

pytestmark = media.needs_pillow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny Gemma 3, its processor, and `rows.jsonl`."""
    folder = tmp_path_factory.mktemp("media")
    model, processor = media.build("gemma3")
    model.float().save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    media.write_rows(folder, rows=6)
    return folder


@pytest.fixture
def run(inside, folder):
    def run(*words, model="model", images="image"):
        columns = ["--images", images] if images else []
        data = ["--data", folder / "rows.jsonl", *columns, "--tokens", 600]
        return inside("calibrate", folder / model, *data, *words)

    return run


def test_the_artifact_counts_media_tokens(run):
    Path("recipe.yaml").write_text("exclude_sink: false\nname: seeing\n")
    done = run("--output", "out", "--recipe", "recipe.yaml", "--length", 512)
    assert done.returncode == 0, done.stderr
    artifact = Artifact.open("out")
    told = artifact.manifest.calibration
    record = json.loads((artifact.folder / "manifest.json").read_text())["calibration"]
    assert told.media_tokens == record["media_tokens"] == 4 * told.rows
    assert record["text_tokens"] == told.tokens - told.media_tokens
    assert artifact.recipe.data.images == "image"
    statistics = artifact.statistics[0]
    assert statistics["query"].count == 2 * told.tokens, "two query heads a KV head"
    assert statistics["key"].count == told.tokens
    words = f"{told.media_tokens} of them of images or audio"
    assert words in make_report(artifact).html()


def test_a_finished_run_is_bound_to_its_images(run, folder):
    assert run("--output", "out", "--quick").returncode == 0
    assert "already done" in run("--output", "out", "--quick").stderr
    assert "another recipe or text" in refused(run("--output", "out", "--quick", images=None))


def test_a_recipe_of_text_keeps_its_hash():
    """Published indexes hold the hashes of recipes; `regenerate` compares them."""
    assert not {"images", "audio"} & Recipe().published()["data"].keys()
    seeing = Recipe(data=Data(images="image"))
    assert seeing.published()["data"]["images"] == "image"
    assert from_dict(seeing.published(), "a manifest") == seeing
    assert from_dict(Recipe().published(), "a manifest") == Recipe()


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights is an error."""
    fail = lambda *_, **__: pytest.fail("read the weights")  # noqa: E731
    monkeypatch.setattr("rotationzoo.model.loading.load", fail)


@pytest.mark.usefixtures("no_weights")
def test_a_model_of_text_is_refused(inside, folder):
    data = ["--data", folder / "rows.jsonl"]
    says = refused(inside("calibrate", "demo", *data, "--images", "image"))
    assert "demo reads no image, which the data has in column image" in says
    says = refused(inside("calibrate", folder / "model", *data, "--audio", "sound"))
    assert "reads no audio, which the data has in column sound" in says


@pytest.mark.usefixtures("no_weights")
def test_a_missing_processor_is_refused(run, folder):
    kept = shutil.ignore_patterns("*processor*", "chat_template*")
    shutil.copytree(folder / "model", folder / "bare", ignore=kept)
    says = "has no processor for images and audio: "
    assert says in refused(run(model="bare"))
    planned = run("--dry-run", model="bare")
    assert "Note: it cannot be calibrated yet: " in planned.stderr
    assert says in planned.stderr
