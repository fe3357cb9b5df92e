"""Rotations of latents (MLA): the folder that SGLang reads, and refusals."""

import re

import pytest
import torch
import transformers
from engines_table import PAGE
from support import architectures
from support.engine_artifacts import OSCAR, WRITTEN, made  # noqa: F401
from support.models import save_family
from support.recipes import QUICK

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks import membership
from rotationzoo.checks.membership import Candidate, check_membership
from rotationzoo.engines.export import export, launch_line
from rotationzoo.engines.payload import Request
from rotationzoo.errors import UsageError
from rotationzoo.recipe import Data

RANK = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one architecture."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("mine", "other"):
        save_family("deepseek_v3", folder / name, kv_lora_rank=RANK)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder / "other")
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.25)
    other.save_pretrained(folder / "other")
    return folder


def test_a_file_for_each_layer(made, tmp_path):  # noqa: F811
    artifact = made("deepseek_v3", QUICK)
    done = export(artifact, Request("sglang-mla", tmp_path / "out"))
    assert len(done.files) == architectures.LAYERS
    for name in done.files:
        written = torch.load(done.path / name)
        rotation = artifact.rotations[int(re.findall(r"\d+", name)[0])].key
        assert torch.equal(written, rotation.matrix[0])
    assert done.launch.environment["SGLANG_OSCAR_MLA_KV_ROTATION_PATH"] == str(done.path)


def test_a_run_tells_a_member_from_a_stranger(models, tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "TEXT", Data(tokens=2048, length=256))
    recipe = QUICK.model_copy(update={"data": Data(tokens=1024, length=256)})
    artifact = calibrate(Job(str(models / "mine"), recipe, tmp_path / "artifact", device="cpu"))
    mine = check_membership(artifact, Candidate(model=str(models / "mine")))
    assert not mine.foreign
    assert mine.lowest > 0.8
    stranger = check_membership(artifact, Candidate(model=str(models / "other")))
    assert stranger.foreign
    assert stranger.lowest < 0.15


def test_engines_of_heads_refuse_latents_and_the_other_way_round(made):  # noqa: F811
    latents, heads = made("deepseek_v3", QUICK), made("qwen3", OSCAR)
    for engine in (*WRITTEN, "vllm"):
        with pytest.raises(UsageError, match=f"{re.escape(engine)} reads rotations of keys and"):
            export(latents, Request(engine))
    with pytest.raises(UsageError, match="sglang-mla reads rotations of latents, and these are of"):
        export(heads, Request("sglang-mla"))


def test_what_sglang_does_not_take_is_said(made, tmp_path):  # noqa: F811
    artifact = made("deepseek_v3", QUICK.model_copy(update={"sink": 8, "recent": 16}))
    done = export(artifact, Request("sglang-mla", tmp_path / "out"))
    lost = "; ".join(done.reduced)
    assert "latents that keep their mean" in lost
    assert "clip ratios 1/1 instead of the artifact's own" in lost
    assert "nearest codes instead of error feedback" in lost
    assert sum("one scale for 20 channels" in note for note in done.launch.notes) == 1
    with pytest.raises(UsageError, match="sglang-mla clips nothing"):
        export(artifact, Request("sglang-mla", tmp_path / "clipped", clip=(0.9, 0.9)))


def test_the_launch_line_of_the_page(made, tmp_path):  # noqa: F811
    page = PAGE.read_text(encoding="utf-8")
    artifact = made("deepseek_v3", QUICK, kv_lora_rank=512)
    done = export(artifact, Request("sglang-mla", tmp_path / "out"))
    line = launch_line(done.launch).replace(str(done.path.absolute()), "FOLDER")
    assert line.replace("tiny/deepseek_v3", "MODEL") in page
    assert not [note for note in done.launch.notes if "unpacked" in note]
