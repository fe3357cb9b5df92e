"""What is published names files and folders, and never says where on somebody's machine they
are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import quick_first
from support.models import DATA
from support.oscar_files import KEY, VALUE, model_of, v1
from support.reports import evaluate, short_probes

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.engines.import_ import import_
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.recipe import Data, Recipe, name_of
from rotationzoo.settings import Import
from rotationzoo.zoo.push import prepare_upload

SMALL = Data(tokens=1024, length=512)


@pytest.fixture
def home(tmp_path, tiny) -> Path:
    """A folder with a telling name that holds a model and texts."""
    folder = tmp_path / "home-of-jane" / "secret project"
    shutil.copytree(tiny, folder / "my-model")
    texts = (DATA / "calibration.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "my-texts.jsonl").write_text("".join(texts[:20]), "utf-8")
    return folder


def written_text(folder: Path) -> str:
    """All that the files of a folder say, tensors too."""
    return "\n".join(path.read_bytes().decode("latin-1") for path in sorted(folder.iterdir()))


@pytest.mark.parametrize("way", quick_first(["absolute", "dot"]))
def test_no_file_of_an_artifact_says_where_it_was_made(way, home, monkeypatch):
    monkeypatch.chdir(home / "my-model")
    model, texts = "." if way == "dot" else str(home / "my-model"), str(home / "my-texts.jsonl")
    # More tokens than there are: a note says so, and of what.
    data = SMALL.model_copy(update={"source": texts, "tokens": 10_000_000})
    artifact = calibrate(Job(model, Recipe(data=data), home / "out", device="cpu", batch=16))
    measured = SMALL.model_copy(update={"source": texts})
    copy = Path(shutil.copytree(artifact.folder, home / "other" / "out"))
    folders, tasks = [artifact.folder, copy], TaskSettings(())
    job = Evaluation(model, folders, measured, device="cpu", tasks=tasks, baselines=())
    with short_probes():
        report = evaluate(replace(job, save_to=[artifact.folder]))
    assert len(report["arms"]) == 2
    listed = prepare_upload(Artifact.open(artifact.folder), "someone/zoo").entry
    said = written_text(artifact.folder) + listed.model_dump_json()
    for telling in ("home-of-jane", "secret project"):
        assert telling not in said
    manifest = json.loads((artifact.folder / "manifest.json").read_text())
    assert manifest["model"]["id"] == "my-model"
    calibration, data = manifest["calibration"], manifest["recipe"]["data"]
    assert calibration["source"] == data["source"] == "my-texts.jsonl"
    assert calibration["note"].endswith("all of my-texts.jsonl")
    assert verify(Artifact.open(artifact.folder), model).ok


def test_a_job_that_is_done_is_known_by_what_it_read(home):
    """The same file elsewhere is the same text; another text of the same name is not."""
    recipe = Recipe(data=SMALL.model_copy(update={"source": str(home / "my-texts.jsonl")}))
    made = calibrate(Job(str(home / "my-model"), recipe, home / "out", device="cpu"))
    moved = shutil.copytree(home, home.parent / "moved")
    elsewhere = Recipe(data=SMALL.model_copy(update={"source": str(moved / "my-texts.jsonl")}))
    again = calibrate(Job(str(moved / "my-model"), elsewhere, home / "out", device="cpu"))
    assert again.content == made.content
    (moved / "my-texts.jsonl").write_text(json.dumps({"text": "other words " * 3000}) + "\n")
    with pytest.raises(Exception, match="another job: text differ"):
        calibrate(Job(str(moved / "my-model"), elsewhere, home / "out", device="cpu"))


def test_what_imported_files_say_of_their_machine_stays_there(home, tmp_path):
    said = {"tokens": 1000, "data": "c4/en"}
    for name, content in ((KEY, v1("key", "qqt_r_h_pbr")), (VALUE, v1("value", "sst_r_h_pbr"))):
        content["calibration"] = {"model_path": str(home / "some-model"), **said}
        torch.save(content, home / name)
    model = model_of(home / "some-model")
    artifact = import_(Import([home / KEY, home / VALUE], tmp_path / "imported", model))
    kept = artifact.content["imported"]["calibration"]
    assert kept == {"model_path": "some-model", **said}
    assert "home-of-jane" not in written_text(artifact.folder)


def test_what_is_a_path_and_what_is_a_name():
    for name in ("open-r1/Mixture-of-Thoughts", "bundled", "https://example.org/a/b.jsonl"):
        assert name_of(name) == name
    for place in ("/home/jane/texts", "~/texts", "../texts", "my/texts.PARQUET"):
        assert name_of(place) == Path(place).name
