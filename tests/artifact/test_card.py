"""The card's words, tried: its Python is run, its numbers are computed again."""

import re
from itertools import product

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.models import save_tiny
from support.places import ROOT

from rotationzoo.artifact.card import render_card
from rotationzoo.artifact.manifest import parse_manifest
from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.size import CONTEXT
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.codec import int2
from rotationzoo.recipe import load, override


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def made(model, folder, **changes) -> Artifact:
    recipe = override(load("oscar"), tokens=1024, length=256).model_copy(update=changes)
    return calibrate(Job(model=str(model), recipe=recipe, output=folder / "out", device="cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"center_keys": True},
        {"center_keys": True, "center_values": True},
        {"pooling": "layer", "center_values": True},
        {"equalize": True, "center_keys": True, "center_values": True},
        {"equalize": True, "pooling": "layer"},
    ],
    ids=["per head", "keys centred", "both centred", "pooled", "equalized", "equalized, pooled"],
)
def test_the_snippet_leaves_attention_as_it_is(model, tmp_path, monkeypatch, changes):
    """Its code alone gives the very output of attention, and stores keys and values without their
    means."""
    folder = made(model, tmp_path, **changes).folder
    page = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(code, names)
    torch.manual_seed(0)
    tensors = load_file("rotations.safetensors")
    for head in range(2):
        q, k, v = (torch.randn(12, 16) + 3 for _ in range(3))
        rotated_q, rotated_k, rotated_v = names["rotate"](q, k, v, head)
        output = names["restore"](torch.softmax(rotated_q @ rotated_k.mT, -1) @ rotated_v, head)
        assert torch.allclose(
            output, torch.softmax(q @ k.mT, -1) @ v, atol=1e-4
        )  # measured 2.3e-5 at most
        for side, rows, stored in (("key", k, rotated_k), ("value", v, rotated_v)):
            mean = tensors.get(f"layers.0.{side}.mean", torch.zeros(2, 16))[head]
            matrix = tensors[f"layers.0.{side}.rotation"]
            rows = rows - mean
            if changes.get("equalize"):
                scales = tensors[f"layers.0.{side}.equalizer"][head]
                rows = rows * scales if side == "key" else rows @ scales
            assert torch.equal(stored, rows @ matrix[head % len(matrix)])
        assert ("- key_mean[head]" in code) == bool(changes.get("center_keys"))


def test_the_size_is_said_for_each_format_and_is_right(model, tmp_path):
    """Of a head dimension of 16 in one group, 64 and 256 of 131,072 tokens exact: computed by
    hand."""
    page = render_card(made(model, tmp_path).manifest)
    exact = 320 / 131072
    for name, kind, bits in (
        ("sglang", "float32", 2 + 64 / 16),
        ("vllm", "float16", 2 + 32 / 16),
        ("mlx", "float16", 4),
    ):
        bits = 16 * exact + bits * (1 - exact)
        assert f"| {name} | {kind} | {bits:.2f} | {16 / bits:.1f} times |" in page


def test_the_readme_says_how_much_smaller_a_cache_is():
    """Every format, head dimension and pair of windows in use, the published recipe of Qwen3-8B
    among them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    stored = []
    for dim, form, (sink, recent) in product(
        (64, 128, 256), int2.FORMATS.values(), ((64, 256), (128, 2048))
    ):
        bits = int2.bits_per_element(dim, None, form, context=CONTEXT, sink=sink, recent=recent)
        stored.append(bits)
    assert {round(16 / bits) for bits in stored} == {5, 6, 7}
    bits = f"{min(stored):.1f} to {max(stored):.1f} bits"
    words = f"is five to seven times smaller ({bits} an element at 128K"
    assert words in readme, words


def test_the_card_has_what_the_hub_understands(tmp_path):
    model = save_tiny(tmp_path / "model")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\nwords")
    artifact = made(model, tmp_path)
    page = (artifact.folder / "README.md").read_text()
    front = yaml.safe_load(page.split("---")[1])
    assert front == {
        "library_name": "rotationzoo",
        "tags": ["kv-cache", "2-bit", "rotation"],
        "license": "apache-2.0",
    }
    on_hub = artifact.content["model"] | {"id": "a/b", "revision": "0" * 40}
    manifest = parse_manifest(artifact.content | {"model": on_hub}, "the manifest")
    front = yaml.safe_load(render_card(manifest).split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("a/b", "quantized")
    for name, file in artifact.content["files"].items():
        assert f"| {name} | {file['size']:,} | `{file['sha256']}` |" in page
