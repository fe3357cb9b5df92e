"""No command uses matrices that are not rotations, and `generate` finds only the user's own."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from support.command_line import put_file, refused, succeeded

from rotationzoo.artifact.store import Artifact
from rotationzoo.linalg.orthogonality import (
    ORTHOGONAL,
    ORTHOGONAL_IMPORTED,
    is_orthogonal,
    orthogonality_error,
)
from rotationzoo.writer import is_remembered, remember

ROTATIONS = "rotations.safetensors"


def plant(made: Path, folder: Path, factor: float, kind=".rotation") -> Path:
    """A copy of an artifact whose tensors are scaled, with every checksum to match."""
    shutil.copytree(made, folder)
    tensors = load_file(folder / ROTATIONS)
    for name, tensor in tensors.items():
        if name.endswith(kind):
            tensor *= factor
    put_file(folder, ROTATIONS, save(tensors))
    return folder


@pytest.mark.hostile("values")
@pytest.mark.parametrize("factor", [2.0, 0.0, 1.0001])
@pytest.mark.parametrize(
    "words",
    [
        ("generate", "demo", "--prompt", "def", "--rotations"),
        ("evaluate", "demo", "--tasks", "none"),
        ("inspect",),
        ("export", "--to", "sglang"),
    ],
    ids=lambda words: words[0],
)
def test_matrices_that_are_not_orthogonal_are_refused(inside, made, words, factor):
    folder = plant(made, inside.folder / "planted", factor)
    assert "rotation not orthogonal: layers 0, 1" in refused(inside(*words, folder))


@pytest.mark.parametrize("dim", [16, 80, 128, 512])
@pytest.mark.parametrize(
    ("imported", "allowed"), [(False, ORTHOGONAL), (True, ORTHOGONAL_IMPORTED)]
)
def test_float32_decides_as_float64_does(dim, imported, allowed):
    generator = torch.Generator().manual_seed(dim)
    matrices = torch.randn(4, dim, dim, generator=generator, dtype=torch.float64)
    exact = torch.linalg.qr(matrices)[0]
    rounding = dim * 2.0**-24
    assert is_orthogonal(exact.float(), imported)
    # Off by less than is allowed, and by more than rounding can hide.
    for error, is_one in ((allowed / 2, True), (3 * (allowed + rounding), False)):
        scaled = (exact * (1 + error) ** 0.5).float()
        assert (orthogonality_error(scaled) <= allowed) == is_one
        assert is_orthogonal(scaled, imported) == is_one
    for value in (float("nan"), 3e38):
        assert not is_orthogonal(torch.full((1, dim, dim), value), imported)


@pytest.mark.hostile("path")
def test_generate_uses_no_artifact_that_somebody_put_there(inside, made):
    words = ("generate", "demo", "--prompt", "def", "--max-new-tokens", "2")
    # Another's sound rotations: 1e-7 is less than rounding.
    planted = plant(made, inside.folder / "rotations" / "demo-transform", 1 + 2e-7)
    error = refused(inside(*words))
    assert (
        "rotations/demo-transform was neither calibrated nor pulled by you on this machine" in error
    )
    assert "add: --rotations rotations/demo-transform" in error
    ran = succeeded(inside(*words, "--rotations", planted))
    # Beside the user's own, nor where its manifest has the hash of the user's own.
    own = Path(shutil.copytree(made, inside.folder / "rotations" / "own"))
    shutil.copy(own / "manifest.json", planted)
    (planted / ROTATIONS).touch()
    ran = inside(*words)
    assert (ran.returncode, "Rotations: rotations/own\n" in ran.stderr) == (0, True), ran.stderr


def test_what_cannot_be_remembered_is_not_the_users(made, tmp_path, monkeypatch):
    artifact = Artifact.open(made)
    assert is_remembered(artifact), "calibrate made it"
    blocked = tmp_path / "a-file"
    blocked.touch()
    for state in (blocked, tmp_path / "state"):
        monkeypatch.setenv("XDG_STATE_HOME", str(state))
        assert not is_remembered(artifact)
        remember(artifact.identity)  # says nothing where the disk refuses
    assert is_remembered(artifact)


def test_what_was_pulled_is_the_users(zoo, made, monkeypatch, tmp_path):
    zoo.run("push", made, "someone/zoo", "--index", "index.json")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for _ in range(2):  # downloaded, and here already
        succeeded(zoo.run("pull", "demo", "--repo", "someone/zoo", "--local-dir", "rotations/x"))
        assert is_remembered(Artifact.open(zoo.folder / "rotations" / "x"))
        shutil.rmtree(tmp_path / "state")
