"""Rotations of latents (MLA): the folder that SGLang reads, files of others, and refusals."""

import re

import pytest
import torch
import transformers
from support import architectures
from support.engine_artifacts import OSCAR, WRITTEN
from support.models import save_family
from support.oscar_files import refused
from support.recipes import CODED, QUICK

from rotationzoo.artifact.reductions import Request
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.collect import collect
from rotationzoo.checks.verify import verify
from rotationzoo.engines.export import export
from rotationzoo.engines.import_ import import_
from rotationzoo.linalg import compositions
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Recipe
from rotationzoo.settings import Import

FITTED = "c_kv_rcov_phblock_g16"
RANK = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model with latents, and one with heads."""
    folder = tmp_path_factory.mktemp("models")
    save_family("deepseek_v3", folder / "mine", kv_lora_rank=RANK)
    save_family("llama", folder / "heads")
    return folder


@pytest.fixture(scope="module")
def moments(models):
    """Layer -> the second moment of the latents of `mine`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "mine").eval()
    ids = torch.randint(3, 2000, (4, 256), generator=torch.Generator().manual_seed(1))
    statistics = collect(model, geometry_of(model), [ids], Recipe())
    return {layer: kinds["latent"].second_moment for layer, kinds in statistics.items()}


@pytest.fixture
def write(tmp_path, moments):
    """Writes a folder as OSCAR's tool for latents does: U P H, with H over groups of 16."""

    def folder_of(name: str = FITTED, entry=lambda layer, matrix, values: matrix):
        folder = tmp_path / name
        folder.mkdir()
        for layer, moment in moments.items():
            values, basis = compositions.eigenbasis(moment)
            matrix = compositions.compose(basis, "r_pbr_hblock", 16)[0].float()
            torch.save(entry(layer, matrix, values[0].float()), folder / f"layer_{layer}.pt")
        return folder

    return folder_of


def read(folder, models, model="mine", **options) -> Artifact:
    output = folder.with_name(f"{folder.name}-{model}")
    return import_(Import([folder], output, model=str(models / model), **options))


def test_published_files_come_back_equal(write, models):
    folder = write()
    artifact = read(folder, models)
    assert (artifact.recipe.group_size, artifact.recipe.name) == (16, "oscar-latent")
    assert verify(artifact).ok
    done = export(artifact, Request("sglang-mla", folder.with_name("exported")))
    assert len(done.files) == architectures.LAYERS
    for name in done.files:
        given, returned = (torch.load(each / name) for each in (folder, done.path))
        assert torch.equal(given, returned)
        rotation = artifact.rotations[int(re.findall(r"\d+", name)[0])].key
        assert torch.equal(returned, rotation.matrix[0])
    assert done.launch.environment["SGLANG_OSCAR_MLA_KV_ROTATION_PATH"] == str(done.path)
    assert done.launch.environment["SGLANG_OSCAR_MLA_KV_GROUP_SIZE"] == "16"


def test_tables_with_a_mean_and_eigenvalues(write, models, moments):
    def table(layer, matrix, values):
        transform = {"latent": "cov", "centered": True, "orthogonal": True}
        mean = torch.full((RANK,), 0.5)
        tensors = {"rotation": matrix, "q_rotation": matrix.clone(), "eigenvalues": values}
        return {**tensors, "mean": mean, "transform": transform}

    artifact = read(write(entry=table), models)
    for layer in moments:
        assert torch.equal(artifact.rotations[layer].key.mean, torch.full((1, RANK), 0.5))
    assert verify(artifact).ok


def test_the_groups_are_those_of_the_name_unless_told_otherwise(write, models):
    folder = write()
    assert read(folder, models, group_size=8).recipe.group_size == 8
    unnamed = folder.rename(folder.with_name("c_kv_rcov_phblock_g0"))
    assert read(unnamed, models).recipe.group_size is None
    wide = unnamed.rename(folder.with_name("c_kv_rcov_phblock_g128"))
    assert "groups of 128 channels do not divide heads of 32" in refused(read, wide, models)


def test_files_of_other_layers_are_refused(write, models):
    folder = write()
    assert "heads is not known to cache any" in refused(read, folder, models, "heads")
    (folder / "layer_3.pt").unlink()
    assert "have no latent rotation for layer 3" in refused(read, folder, models)


PAIR = {"rotation": torch.eye(RANK), "q_rotation": 2 * torch.eye(RANK)}
WRONG = {
    "is not an orthogonal matrix": 2 * torch.eye(RANK),
    "is not a square matrix": torch.eye(RANK)[:8],  # a subspace that stays exact
    "has no mean for layer 0": {"rotation": torch.eye(RANK), "mean": torch.zeros(RANK)},
    "rotations that are not orthogonal": {**PAIR, "transform": {"orthogonal": False}},
    "cannot be opened as plain tensors": {"rotation": torch.nn.Linear(2, 2)},
    "its tensors ask for": torch.zeros(1).expand(1 << 20, 1 << 20),
}


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("words", WRONG)
def test_a_file_that_is_no_rotation_is_refused(write, models, words):
    """Among others one that runs code, and one that asks for more memory than it has bytes."""
    folder = write()
    torch.save(WRONG[words], folder / "layer_3.pt")
    assert words in refused(read, folder, models)


def test_engines_of_heads_refuse_latents_and_the_other_way_round(made):
    latents, heads = made("deepseek_v3", QUICK), made("qwen3", OSCAR)
    for engine in WRITTEN:
        assert f"{engine} reads rotations of keys and" in refused(export, latents, Request(engine))
    said = refused(export, heads, Request("sglang-mla"))
    assert "sglang-mla reads rotations of latents, and these are of" in said


def test_what_sglang_does_not_take_is_said(made, tmp_path):
    artifact = made("deepseek_v3", CODED.model_copy(update={"sink": 8, "recent": 16}))
    done = export(artifact, Request("sglang-mla", tmp_path / "out"))
    lost = "; ".join(done.reduced)
    assert "latents that keep their mean" in lost
    assert "clip ratios 1/1 instead of the artifact's own" in lost
    assert "nearest codes instead of transform coding" in lost
    assert sum("one scale for 20 channels" in note for note in done.launch.notes) == 1
    assert sum("stored unpacked" in note for note in done.launch.notes) == 1
    assert "triton" not in done.launch.command[0]
    clipped = Request("sglang-mla", tmp_path / "clipped", clip=(0.9, 0.9))
    assert "sglang-mla clips nothing" in refused(export, artifact, clipped)


@pytest.mark.parametrize(
    ("family", "engine"), [("kimi_linear", "sglang-mla"), ("qwen3_5", "sglang")]
)
def test_hybrids_get_the_buffer_that_their_prefix_cache_needs(family, engine, made, tmp_path):
    done = export(made(family, QUICK), Request(engine, tmp_path / "out"))
    assert done.launch.command[0].endswith("--mamba-radix-cache-strategy extra_buffer")
