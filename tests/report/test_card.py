"""The card's words, tried: its Python is run, its numbers are computed again."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.cases import quick_first
from support.models import save_family, save_tiny
from support.published import ok
from support.reports import summary

from rotationzoo import Artifact, calibrate
from rotationzoo.artifact.manifest import parse_manifest
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.report.card import render_card, reproduce_command


def made(model, folder, **changes) -> Artifact:
    recipe = PRESETS["oscar"].model_copy(update=changes)
    options = dict(tokens=1024, length=256, device="cpu")
    return calibrate(str(model), output=folder / "out", recipe=recipe, **options)


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory) -> Artifact:
    """An artifact of the tiny model, which no test may change."""
    return made(tiny, tmp_path_factory.mktemp("plain"))


def run_snippet() -> tuple[str, dict]:
    """The Python of the card in the current folder, and the names that it defines."""
    page, names = Path("README.md").read_text(), {}
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, names)
    return code, names


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"center_values": True},
        {"pooling": "layer", "center_keys": False, "center_values": True},
    ],
    ids=["keys centered", "both centered", "pooled"],
)
def test_the_snippet_leaves_attention_as_it_is(tiny, tmp_path, monkeypatch, changes):
    """Its code alone gives the very output of attention, and stores keys and values without their
    means."""
    folder = made(tiny, tmp_path, **changes).folder
    monkeypatch.chdir(folder)
    code, names = run_snippet()
    torch.manual_seed(0)
    tensors = load_file("rotations.safetensors")
    for head in range(2):
        q, k, v = (torch.randn(12, 16) + 3 for _ in range(3))
        rotated_q, rotated_k, rotated_v = names["rotate"](q, k, v, head)
        output = names["restore"](torch.softmax(rotated_q @ rotated_k.mT, -1) @ rotated_v, head)
        exact = torch.softmax(q @ k.mT, -1) @ v
        assert torch.allclose(output, exact, atol=1e-4)  # measured 2.3e-5 at most
        for side, rows, stored in (("key", k, rotated_k), ("value", v, rotated_v)):
            mean = tensors.get(f"layers.0.{side}.mean", torch.zeros(2, 16))[head]
            matrix = tensors[f"layers.0.{side}.rotation"]
            rows = rows - mean
            assert torch.equal(stored, rows @ matrix[head % len(matrix)])
        assert ("- key_mean[head]" in code) == changes.get("center_keys", True)


@pytest.mark.parametrize("centered", [True, False])
def test_the_snippet_for_latents_restores_them(tmp_path, monkeypatch, centered):
    model = save_family("deepseek_v3", tmp_path / "model")
    artifact = made(model, tmp_path, center_keys=centered)
    page = (artifact.folder / "README.md").read_text()
    monkeypatch.chdir(artifact.folder)
    _, names = run_snippet()
    latents = torch.randn(12, 20) + 3
    rotation, stored = artifact.rotations[0].key, names["rotate"](latents)
    mean = rotation.mean[0] if centered else torch.zeros(20)
    assert torch.equal(stored, (latents - mean) @ rotation.matrix[0])
    assert torch.allclose(names["restore"](stored), latents, atol=1e-5)
    assert "--for sglang-mla" in page
    assert "R_K" not in page


def test_the_size_is_said_for_each_format_and_is_right(plain):
    """Of a head dimension of 16 in one group, 64 and 256 of 131,072 tokens exact: computed by
    hand."""
    page = render_card(plain.manifest)
    exact = 320 / 131072
    for name, kind, bits in (("sglang", "float32", 2 + 64 / 16), ("vllm", "float16", 2 + 32 / 16)):
        bits = 16 * exact + bits * (1 - exact)
        assert f"| {name} | {kind} | {bits:.2f} | {16 / bits:.1f} times |" in page


def test_the_card_has_what_the_hub_understands(tmp_path):
    model = save_tiny(tmp_path / "model")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\nwords")
    artifact = made(model, tmp_path)
    page = (artifact.folder / "README.md").read_text()
    front = yaml.safe_load(page.split("---")[1])
    tags = ["kv-cache", "2-bit", "rotation", "arxiv:2605.17757"]
    assert front == {"library_name": "rotationzoo", "tags": tags, "license": "apache-2.0"}
    on_hub = artifact.content["model"] | {"id": "a/b", "revision": "0" * 40}
    manifest = parse_manifest(artifact.content | {"model": on_hub}, "the manifest")
    front = yaml.safe_load(render_card(manifest).split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("a/b", "quantized")
    for name, file in artifact.content["files"].items():
        assert f"| {name} | {file['size']:,} | `{file['sha256']}` |" in page
    calibration = artifact.content["calibration"]
    for source, names in (("owner/texts", ["owner/texts"]), ("mine.jsonl", None)):
        described = calibration | {"source": source}
        manifest = parse_manifest(artifact.content | {"calibration": described}, "the manifest")
        front = yaml.safe_load(render_card(manifest).split("---")[1])
        assert front.get("datasets") == names


def test_shares_of_fewer_questions_stand_in_no_table(plain):
    """The first ones may be easier: they would put a baseline before the artifact."""
    exact = {"needles": 16, "copy": 0}
    evaluation = summary({"mine": 15, "identity": 4}, plain.identity, exact)
    evaluation["arms"]["identity"]["all_tasks"] |= {"questions": 8, "answered": 8}
    metrics = plain.content["metrics"] | {"evaluation": evaluation}
    page = render_card(parse_manifest(plain.content | {"metrics": metrics}, "the manifest"))
    assert "| mine | 93.8% ±1.0% | -0.25 |" in page
    assert "100.0%" not in page.partition("| mine |")[2]
    assert "Identity: asked the first 8 of 16 questions" in page
    assert "not been measured" in render_card(plain.manifest)


@pytest.mark.parametrize(
    "options",
    quick_first(
        [
            "--recipe random --seed 7",
            "--recipe identity",
            "--recipe recipe.yaml",
            "--recipe attention --bits 2.5 --tokens 1024 --length 256 --batch 2 --seed 3",
            "--quick --tokens 1024 --length 256",
            "--recipe oscar-v1 --tokens 1024 --length 256 --dtype bfloat16",
        ],
        2,
    ),
)
def test_the_command_on_the_card_makes_the_same_rotations(inside, options):
    Path("recipe.yaml").write_text("name: own\nkey_clip: 0.8\ndata: {tokens: 512, length: 256}\n")
    assert inside("calibrate", "demo", *options.split(), "-o", "first").returncode == 0
    page = Path("first/README.md").read_text()
    (line,) = re.findall(r"## How to make it again\n\n    (.*)\n", page)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    Path("recipe.yaml").write_text(recipe)
    program, *words = shlex.split(line)
    assert program == "rotationzoo"
    again = ok(inside(*words, "-o", "again", "--json"))
    assert again["identity"] == Artifact.open("first").identity
    assert ("--recipe recipe.yaml" in line) == (options != "--recipe identity")


def test_the_command_of_a_run_on_gpus_names_how_it_ran(plain):
    content, device = plain.content, {"device": "NVIDIA H200"}
    how = {"dtype": "auto", "device_map": "auto", "batch": "16", **device}
    hub = content["model"] | {"id": "a/b", "revision": "0" * 40}
    manifest = content | {"run": content["run"] | device, "model": hub}
    manifest["identity"] = content["identity"] | how
    words = reproduce_command(parse_manifest(manifest, "the manifest"))
    assert words == (
        f"rotationzoo calibrate a/b --revision {'0' * 40} --recipe recipe.yaml "
        "--batch 16 --device-map auto"
    )


def test_imported_files_have_no_command(plain):
    assert reproduce_command(plain.manifest.model_copy(update={"imported": object()})) is None


@pytest.mark.hostile("markup")
def test_a_models_name_runs_nothing_in_a_shell(plain):
    model = plain.manifest.model.model_copy(update={"id": "a/b; touch taken", "revision": "abc"})
    named = plain.manifest.model_copy(update={"model": model})
    assert "rotationzoo evaluate 'a/b; touch taken' FOLDER" in render_card(named)
    assert shlex.split(reproduce_command(named))[2] == model.id
