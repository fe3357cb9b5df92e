"""A model and a maker's rotations on a loopback hub, for tests that pull and regenerate."""

import pytest
import torch

from support.published import ZOO, ok


def foreign(objective: str = "qqt_r_h_pbr", layers: int = 2, dim: int = 16, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    matrices = {
        i: torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0] for i in range(layers)
    }
    rotation = {
        i: {"layer_id": i, "rotation": matrix, "eigenvalues": torch.ones(dim)}
        for i, matrix in matrices.items()
    }
    return {
        "format_version": 1,
        "objective": objective,
        "source_grouping": "layer",
        "layers": rotation,
    }


def publish_oscar_pair(zoo, tmp_path, **contents) -> None:
    files = {}
    for name in ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"):
        torch.save(contents.get(name[0], foreign(name[11:-3], seed=ord(name[0]))), tmp_path / name)
        files[f"Qwen3-8B/seq20000_prompt83_group128/{name}"] = (tmp_path / name).read_bytes()
    if "Zhongzhu/OSCAR-RotationZoo" not in zoo.hf.repositories:
        zoo.hf.create("Zhongzhu/OSCAR-RotationZoo")
    zoo.hf.commit("Zhongzhu/OSCAR-RotationZoo", files)


CONFIG = """model: someone/model
extends: oscar
sink: 8
recent: 24
data:
  source: bundled
  tokens: 2048
  length: 256
"""


EVALUATED = ["--tokens", "1024", "--length", "256", "--tasks", "none"]


@pytest.fixture
def model(zoo, monkeypatch, tmp_path):
    """The demo model on the hub, a recipe for it, and its rotations published from its first
    revision."""
    from rotationzoo.model.source import DEMO

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    zoo.hf.create("someone/model")
    zoo.hf.commit("someone/model", {path.name: path.read_bytes() for path in DEMO.iterdir()})
    (zoo.folder / "configs").mkdir()
    (zoo.folder / "configs" / "model.yaml").write_text(CONFIG)
    return "someone/model"


def planned(zoo) -> list[dict]:
    return ok(zoo.run("regenerate", "--plan", "--repo", ZOO, "--json"))["models"]


def change_weights(zoo, model: str) -> str:
    """A new revision: one row of a weight matrix is a little different."""
    from safetensors.torch import load, save

    weights = load(zoo.hf.files(model)["model.safetensors"])
    name = next(name for name in sorted(weights) if name.endswith("q_proj.weight"))
    weights[name][0] *= 1.02
    return zoo.hf.commit(model, {"model.safetensors": save(weights, metadata={"format": "pt"})})
