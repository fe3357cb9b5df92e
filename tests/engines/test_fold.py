"""Equalizers in the weights: the same logits from equalized keys and values, or a refusal that says
why not."""

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import architectures
from support.architectures import BASE, CALIBRATED, families
from support.command_line import only_error
from support.equalizers import calibrated_equalizers, equalized, random_equalizers
from support.models import save_tiny
from support.places import ROOT
from support.reports import evaluate

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import RECORD, folded_rotations, rotations_for
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.membership import Candidate, check_membership
from rotationzoo.checks.verify import verify
from rotationzoo.codec import int2
from rotationzoo.engines import weight_edits
from rotationzoo.engines.absorb import absorb, equalizer_changes, fold
from rotationzoo.engines.export import export
from rotationzoo.engines.payload import Request
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.evaluation.arms import pooled_rotations
from rotationzoo.evaluation.job import Evaluation
from rotationzoo.model import loading
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.key_scales import check_values, find_key_scales, with_equalizing
from rotationzoo.model.source import find, weights_fingerprint
from rotationzoo.recipe import PRESETS, Data
from rotationzoo.rotations import SIDES
from rotationzoo.simulation.arm import Arm

IDS = torch.randint(3, 59, (2, 24), generator=torch.Generator().manual_seed(1))
# Family -> why it cannot carry equalizers: a table in docs/engines.md. All others can.
TABLE = re.compile(r"^\| (\S+) \| (layer \d+) (has .*) \|$", re.MULTILINE)
REFUSED = {
    name: f"{layer} of the model {reason}"
    for name, layer, reason in TABLE.findall((ROOT / "docs" / "engines.md").read_text())
}
assert len(REFUSED) == 6, "the rows of the table were found"
# How far logits may move, relative to the largest: with calibrated equalizers (1.0e-6 was measured
# in 24 seeds), and with random ones of condition numbers up to 30 (2.0e-6 in 16 seeds).
TOLERANCES = (2e-6, 3e-6)
# 2.4e-6 and 5.8e-6; its float32 arithmetic is wrong by 2e-5.
OF_GPT_OSS = (4e-6, 8e-6)


def widen(model: torch.nn.Module) -> None:
    """Give norms and biases weights that initialisation does not give them."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def look(model) -> tuple[torch.Tensor, dict[tuple[int, str], torch.Tensor]]:
    """The logits of a model, and the keys and values `[B, H_kv, T, D]` of each layer."""
    rows = {}

    def observe(layer, query, key, value, output):
        rows.update({(layer, "key"): key, (layer, "value"): value})

    with torch.no_grad(), capture(model, observe):
        return model(input_ids=IDS, use_cache=False).logits, rows


def check_same(plain, folded, equalizers, tolerance: float) -> None:
    """The same logits of two models in float64, from equalized keys and values.

    Float32 arithmetic is wrong by more than what the float32 weights do is allowed to be.
    """
    (logits, rows), (folded_logits, folded_rows) = look(plain), look(folded)
    assert (folded_logits - logits).abs().max() <= tolerance * logits.abs().max()
    for (layer, side), equalizer in equalizers.items():
        matrix = torch.diag_embed(equalizer) if side == "key" else equalizer
        expected = rows[layer, side] @ matrix.double()
        size = expected.abs().max()
        assert (folded_rows[layer, side] - expected).abs().max() <= 5e-6 * size
        if not torch.equal(matrix, torch.eye(matrix.shape[-1]).expand_as(matrix)):
            assert (folded_rows[layer, side] - rows[layer, side]).abs().max() > 0.1 * size


def fold_in_memory(model, on_meta, geometry, equalizers):
    """A copy of a model with equalizers in its weights."""
    rotations = {
        layer: {side: SimpleNamespace(equalizer=equalizers[layer, side]) for side in SIDES}
        for layer, _ in equalizers
    }
    artifact = SimpleNamespace(geometry=geometry, rotations=rotations)
    folded = copy.deepcopy(model)
    names = dict(folded.named_parameters())
    with torch.no_grad():
        for name, change in equalizer_changes(artifact, on_meta, "this").items():
            if name not in names:  # a vision model, of which the text alone is traced
                name = name.replace("model", "model.language_model", 1)
            parameter = folded.get_parameter(name)
            parameter.copy_(change.transform(parameter.double()))
    return folded


@families(CALIBRATED)
def test_every_family_folds_or_says_why_not(name, monkeypatch):
    on_meta = loading.on_meta(architectures.config(name), "this")
    geometry = geometry_on_meta(on_meta)
    refusal = REFUSED.get(name)
    if refusal is not None and "has keys" in refusal:
        with pytest.raises(UnsupportedModel, match=re.escape(refusal)):
            with_equalizing(on_meta, geometry)
        return
    if refusal is not None:
        assert check_values(on_meta, geometry) == refusal
    geometry = with_equalizing(on_meta, geometry)
    assert {layer.fixed_values for layer in geometry} == {refusal is not None}
    scales = find_key_scales(on_meta, geometry, "this")
    monkeypatch.setattr(
        "rotationzoo.engines.absorb.find_key_scales", lambda *_: scales
    )  # found already
    tolerances = OF_GPT_OSS if name == "gpt_oss" else TOLERANCES
    model = architectures.build(name)
    if getattr(decoder(model).config, "_experts_implementation", None):
        model.set_experts_implementation("eager")  # the others have no float64
    widen(model)
    equalizers = calibrated_equalizers(model, geometry)
    folded = fold_in_memory(model, on_meta, geometry, equalizers)
    check_same(model.double(), folded.double(), equalizers, tolerances[0])
    equalizers = random_equalizers(geometry)
    folded = fold_in_memory(model.float(), on_meta, geometry, equalizers)
    check_same(model.double(), folded.double(), equalizers, tolerances[1])


def save(folder: Path, kind: str, dtype=torch.float32, shards: str = "5GB", **changes) -> Path:
    """A random model whose biases and norms are not what initialisation makes of them."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25).add_(parameter.ndim == 1)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


def load(folder: Path, dtype=torch.float64):
    """As anybody would, without this package."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def equalizers_of(artifact: Artifact) -> dict[tuple[int, str], torch.Tensor]:
    return {
        (layer, side): rotation.equalizer for layer, side, rotation in artifact.rotations.each()
    }


def test_a_sharded_model_with_tied_embeddings_and_biases(tmp_path):
    folder = save(tmp_path / "qwen2", "Qwen2", shards="20KB", tie_word_embeddings=True)
    assert len(list(folder.glob("*.safetensors"))) > 3
    artifact = equalized(folder)
    output = fold(artifact, str(folder), tmp_path / "folded")
    check_same(load(folder), load(output), equalizers_of(artifact), TOLERANCES[1])
    before, after = load(folder).state_dict(), load(output).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    parts = {name.split(".", 3)[3] for name in changed}
    ends = [f"{part}_proj.{end}" for part in "qkv" for end in ("weight", "bias")]
    assert parts == {f"self_attn.{end}" for end in [*ends, "o_proj.weight"]}
    record = json.loads((output / RECORD).read_text())
    assert record["absorbed"] == "equalizer"
    assert record["artifact"] == artifact.identity
    assert record["published_weights"] == weights_fingerprint(find(str(folder)))
    assert record["weights"] == weights_fingerprint(find(str(output)))


def test_factors_of_keys_are_exact_in_bfloat16(tmp_path):
    folder = save(tmp_path / "half", "Qwen3", torch.bfloat16, head_dim=16)
    artifact = equalized(folder)
    output = fold(artifact, str(folder), tmp_path / "folded")
    before, after = (load(path, "auto").state_dict() for path in (folder, output))
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    factors = artifact.rotations[0].key.equalizer[0]
    attention = "model.layers.0.self_attn"
    for norm, scale in (("k_norm", factors), ("q_norm", 1 / factors)):
        name = f"{attention}.{norm}.weight"
        assert torch.equal(after[name].double(), before[name].double() * scale.double())
    for kept in ("k_proj", "q_proj"):
        assert torch.equal(*(state[f"{attention}.{kept}.weight"] for state in (before, after)))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """A saved model, a calibrated artifact with equalizers and means, its folded copy, and another
    artifact without equalizers."""
    folder = save_tiny(tmp_path_factory.mktemp("fold") / "tiny")
    changes = {"data": Data(tokens=1024, length=256), "center_values": True}
    recipe = PRESETS["oscar"].model_copy(update=changes | {"equalize": True})
    artifact = calibrate(Job(str(folder), recipe, folder.with_name("equalized"), device="cpu"))
    folded = fold(artifact, str(folder), folder.with_name("folded"))
    recipe = PRESETS["oscar"].model_copy(update=changes)
    plain = calibrate(Job(str(folder), recipe, folder.with_name("plain"), device="cpu"))
    return SimpleNamespace(folder=folder, artifact=artifact, folded=folded, plain=plain)


def refused(call, match: str) -> str:
    with pytest.raises(RotationZooError, match=match) as refusal:
        call()
    return refusal.value.hint


def test_what_is_not_to_be_folded_is_refused_and_leaves_nothing(made, tmp_path, monkeypatch):
    artifact, folder, output = made.artifact, str(made.folder), tmp_path / "out"
    assert "--absorb-values" in refused(lambda: fold(made.plain, folder, output), "not equalized")
    assert "--absorb" in refused(lambda: absorb(artifact, folder, output), "is equalized")
    refused(lambda: fold(artifact, str(made.folded), output), "carry the equalizer of an artifact")

    def full(source, target):
        raise OSError(28, "No space left on device")

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(weight_edits.shutil, "copyfile", full)
    assert "make room" in refused(lambda: fold(artifact, folder, output), "No space left")
    assert sorted(tmp_path.iterdir()) == before


def test_verify_says_which_weights_it_was_given(made, tmp_path):
    published = verify(made.artifact, str(made.folder))
    folded = verify(made.artifact, str(made.folded))
    assert published.ok, published.problems
    assert folded.ok, folded.problems
    assert published.checked[-1] == f"the published weights of {made.folder}"
    assert folded.checked[-1] == f"the folded weights of {made.folded}"
    assert "equalizer of another artifact" in verify(made.plain, str(made.folded)).problems[0]
    assert verify(made.plain, str(made.folder)).checked[-1] == f"the weights of {made.folder}"
    changed = shutil.copytree(made.folded, tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    assert "made for other weights" in verify(made.artifact, str(changed)).problems[0]


def test_an_artifact_serves_both_frames(made):
    """Rows of the folded model, in its frame, are quantized as those of the published one are."""
    published, folded = (find(str(folder)) for folder in (made.folder, made.folded))
    assert rotations_for(made.artifact, published) is made.artifact.rotations
    assert not rotations_for(made.artifact, folded).equalized
    arms = [Arm("", rotations_for(made.artifact, source)) for source in (published, folded)]
    rows = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    for layer, side, rotation in made.artifact.rotations.each():
        equalizer = rotation.equalizer
        matrix = torch.diag_embed(equalizer) if side == "key" else equalizer
        restored = arms[0].fake_quantize(rows, layer, side, int2.SGLANG) @ matrix
        in_frame = arms[1].fake_quantize(rows @ matrix, layer, side, int2.SGLANG)
        # 2e-6 was measured; a mean in the wrong frame differs by more than 1.
        assert (restored - in_frame).abs().max() <= 2e-5


def test_rotations_are_pooled_and_looked_for_in_the_folded_frame(made):
    pooled = pooled_rotations(made.artifact, folded_rotations(made.artifact))
    assert not pooled.equalized
    query = made.artifact.statistics[1]["query"].second_moment
    factors = made.artifact.rotations[1].key.equalizer.double()
    folded = query / factors[:, :, None] / factors[:, None]
    expected = torch.linalg.eigvalsh(folded.mean(0)).float()
    assert torch.allclose(pooled[1].key.eigenvalues[0], expected, rtol=1e-4)
    found = [
        check_membership(made.artifact, Candidate(str(folder), device="cpu"))
        for folder in (made.folder, made.folded)
    ]
    assert not found[0].foreign
    # They differ by 1e-8: both are what the folded weights compute.
    assert found[0].key == pytest.approx(found[1].key, abs=1e-3)
    assert found[0].value == pytest.approx(found[1].value, abs=1e-3)


def test_evaluate_applies_the_equalizer_where_the_weights_do_not(made):
    text = Data(tokens=384, length=192)
    figures = []
    for folder, words in (
        (made.folder, "so the cache applies it"),
        (made.folded, "the cache only rotates"),
    ):
        job = Evaluation(str(folder), [made.artifact.folder], text, windows=[(4, 16)], device="cpu")
        report = evaluate(job)
        assert any(words in note for note in report["notes"])
        assert not any("other weights" in note for note in report["notes"])
        figures.append(report["arms"][made.artifact.folder.name]["perplexity"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)
    job = Evaluation(str(made.folded), [made.plain.folder], text, windows=[(4, 16)], device="cpu")
    assert "published" in refused(lambda: evaluate(job), "the equalizer of another artifact")


def test_engines_get_the_folded_frame_and_serve_the_folded_model(made, tmp_path, inside):
    artifact = made.artifact
    request = Request("sglang", tmp_path / "out", uncentered=True)
    refused(lambda: export(artifact, request), "a model whose weights carry its equalizers")
    name, folded = artifact.folder, f"exports/{artifact.folder.name}-folded"
    asked = only_error(inside("export", name, "--to", "vllm", "--clip", "0.9/0.8"))
    flags = "--folded", "--pooled", "--windows"
    assert all(f"({flag})" in asked for flag in flags), "all at once"
    assert asked.endswith(
        f"with all of that: rotationzoo export {name} --absorb MODEL -o {folded} && "
        f"rotationzoo export {name} --to vllm --clip 0.9/0.8 --folded {folded} "
        "--pooled --windows 0/0\n"
    )
    refused(
        lambda: export(artifact, replace(request, folded=made.folder)), "it has no rotationzoo.json"
    )
    refused(
        lambda: export(made.plain, replace(request, folded=made.folded)),
        "carries the equalizer of another artifact",
    )
    result = inside("export", artifact.folder, "--absorb", made.folder, "-o", "copy", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"model": "copy"}
    done = inside("export", artifact.folder, "--to", "sglang", "--folded", "copy", "--json")
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout)
    assert served["reduced"] == ["values that keep their mean"]
    assert f"--model-path {inside.folder / 'copy'}" in served["command"][0]
    files = {name: inside.folder / served["path"] / name for name in served["files"]}
    pair = [torch.load(path, weights_only=True) for path in files.values() if path.suffix == ".pt"]
    assert len(pair) == 2
    assert inside("export", artifact.folder, "--absorb", "x", "--pooled").returncode == 2
    two = ["--to", "mlx", "--folded", "copy", "--values-absorbed", "copy"]
    assert inside("export", artifact.folder, *two).returncode == 2
