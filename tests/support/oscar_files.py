"""Rotation files as OSCAR's tools publish them, written here by code of our own."""

import shutil
import struct
from functools import cache
from pathlib import Path

import pytest
import torch
from scipy.linalg import hadamard as sylvester
from transformers import Qwen3Config

from rotationzoo.artifact.store import Artifact
from rotationzoo.engines.import_ import import_
from rotationzoo.errors import RotationZooError
from rotationzoo.settings import Import

LAYERS, DIM = 4, 64
KEY, VALUE = "k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"


def query_moment(dim: int, seed: int) -> torch.Tensor:
    """A second moment that RoPE leaves behind: the mean over positions of a turned one, pairs (i, i
    + D/2)."""
    generator = torch.Generator().manual_seed(seed)
    base = value_moment(dim, seed + 1000)
    positions = torch.randint(0, 100_000, (400, 1), generator=generator)
    angles = positions * 100.0 ** -(torch.arange(dim // 2).double() / (dim // 2))
    cos, sin = angles.cos().diag_embed(), angles.sin().diag_embed()
    turns = torch.cat([torch.cat([cos, sin], -1), torch.cat([-sin, cos], -1)], -2)
    return (turns.mT @ base @ turns).mean(0)


def value_moment(dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4 * dim, dim, generator=generator, dtype=torch.float64)
    rows = rows * torch.rand(dim, generator=generator).exp() ** 3
    rows = rows @ torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return rows.T @ rows / len(rows)


def published(moment: torch.Tensor, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """U H P and the eigenvalues, as the published code computes them; `descending` as the fork's
    calibrator does."""
    dim = len(moment)
    eigenvalues, vectors = torch.linalg.eigh(moment)
    bits = dim.bit_length() - 1
    reversal = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(dim)]
    order = torch.argsort(eigenvalues, descending=True).tolist()
    if descending:
        eigenvalues, vectors, order = eigenvalues.flip(0), vectors.flip(1), list(range(dim))
    perm = [0] * dim
    for i in range(dim):
        perm[reversal[i]] = order[i]
    mixed = vectors @ torch.from_numpy(sylvester(dim)).double() / dim**0.5
    return mixed[:, perm].float().contiguous(), eigenvalues.float()


@cache
def moments(side: str) -> list[torch.Tensor]:
    """Those of all layers."""
    if side == "key":
        return [query_moment(DIM, layer) for layer in range(LAYERS)]
    return [value_moment(DIM, 100 + layer) for layer in range(LAYERS)]


def model_of(folder: Path, heads: int = 1) -> str:
    """A folder with the config of a model that has these layers and KV heads."""
    config = Qwen3Config(
        num_hidden_layers=LAYERS, head_dim=DIM, num_attention_heads=heads,
        num_key_value_heads=heads, hidden_size=64, intermediate_size=64, vocab_size=64,
    )  # fmt: skip
    config.save_pretrained(folder)
    return str(folder)


def v1_file(layers: dict, **changes) -> dict:
    head = {"format_version": 1, "objective": "qqt_r_h_pbr", "source_grouping": "layer"}
    return {**head, **changes, "layers": layers}


def v1(side: str, objective: str, layers=range(LAYERS), **options) -> dict:
    table = {}
    for i in layers:
        matrix, eigenvalues = published(moments(side)[i], **options)
        table[i] = {"layer_id": i, "rotation": matrix, "eigenvalues": eigenvalues}
    return v1_file(table, objective=objective)


@pytest.fixture
def pair(tmp_path):
    """A folder with a pair in it, after a change; and the import of it."""

    class Pair:
        folder = tmp_path / "pair"
        key, value = v1("key", "qqt_r_h_pbr"), v1("value", "sst_r_h_pbr")

        def write(self, key_name: str = KEY, value_name: str = VALUE) -> Path:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            torch.save(self.key, self.folder / key_name)
            torch.save(self.value, self.folder / value_name)
            return self.folder

        def read(self, *names: str, **options) -> Artifact:
            self.write(*names)
            model = model_of(tmp_path / "model")
            output = tmp_path / "imported"
            return import_(Import([self.folder], output, model, restart=True, **options))

        def refused(self, *names: str, **options) -> str:
            with pytest.raises(RotationZooError) as error:
                self.read(*names, **options)
            assert not (tmp_path / "imported").exists()
            return f"{error.value} ({error.value.hint})"

    return Pair()


def refused(function, *arguments, **options) -> str:
    """The one sentence that a call ends with, such as one with a hostile file."""
    with pytest.raises(RotationZooError) as error:
        function(*arguments, **options)
    words = str(error.value)
    assert "\n" not in words
    assert len(words) < 400
    return words


def deep(depth: int) -> dict:
    """Tables in tables."""
    nested: dict = {}
    for _ in range(depth):
        nested = {"a": nested}
    return nested


def entry(**changes) -> dict:
    return {"layer_id": 0, "rotation": torch.eye(64), **changes}


def torch_file(path: Path, layers: dict, **top) -> Path:
    torch.save(v1_file(layers, **top), path)
    return path


def gguf_bytes(*, fields: int = 0, tensors: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, fields) + body


def gguf_field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def gguf_tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    words = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape) % 2**32)
    return words + b"".join(struct.pack("<Q", n) for n in shape) + struct.pack("<IQ", kind, offset)
