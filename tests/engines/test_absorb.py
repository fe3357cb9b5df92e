"""A value rotation in the weights: the same logits from rotated values, or a refusal that says why
not."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import architectures
from support.architectures import BASE, CALIBRATED, families
from support.models import save_tiny
from support.published import ok
from support.quantized import set_quantization
from support.recipes import QUICK
from support.tensors import stored_rotations

from rotationzoo.artifact.manifest import ROTATIONS
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.calibration.soundness import Verification
from rotationzoo.engines.absorb import absorb
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.model import loading
from rotationzoo.model.absorbed import RECORD
from rotationzoo.model.capture import decoder, intercept
from rotationzoo.model.source import find
from rotationzoo.recipe import Data
from rotationzoo.recipe.loading import PRESETS

IDS = torch.randint(3, 59, (2, 24), generator=torch.Generator().manual_seed(1))
GATED = "has a gate or a norm between attention and the output projection, aten.mul.Tensor"


# Families that are calibrated and cannot absorb a rotation -> the words that the refusal must
# contain; all others can.
REFUSED = {
    "gemma4": r"layer 0 of \S+ has a norm or another operation between the value projection and "
    "attention",
    "qwen3_next": rf"layer 3 of \S+ {GATED}",
    "qwen3_5": rf"layer 3 of \S+ {GATED}",
    "qwen3_5-vlm": rf"layer 3 of \S+ {GATED}",
    "phi3": r"layer 0 of \S+ has a fused value projection, model.layers.0.self_attn.qkv_proj",
    "doge": r"layer 0 of \S+ has another use of its values than its attention, in "
    "model.layers.0.self_attn.dt_proj",
}


def rotate(folder: Path, preset: str = "random", **changes) -> Artifact:
    """A data-free artifact for a saved model."""
    recipe = PRESETS[preset].model_copy(update=changes)
    return calibrate(
        Job(str(folder), recipe, folder.with_name(f"{folder.name}-{preset}"), device="cpu")
    )


def look(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The logits of a saved model, and the values `[B, H_kv, T, D]` that each layer's attention is
    handed, or the latents that these are made of."""
    values: dict[int, torch.Tensor] = {}

    def note(call):
        latent = call.attend.latent
        values[call.layer] = call.value if latent is None else latent
        return call.run()

    source = find(str(folder))
    model = loading.load(source, loading.load_config(source), "cpu", dtype)
    if getattr(decoder(model).config, "_experts_implementation", None):
        model.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad(), intercept(model, note):
        return model(input_ids=IDS, use_cache=False).logits, values


def check(folder: Path, artifact: Artifact, output: Path) -> None:
    """The same logits, from rotated values. The float32 arithmetic of these models is wrong by up
    to 3e-6 of the logits already, so what the rounded weights do is looked at in float64."""
    plain, values = look(folder, torch.float64)
    absorbed, rotated = look(output, torch.float64)
    assert (absorbed - plain).abs().max() <= 2e-6 * plain.abs().max()
    assert (look(folder, torch.float32)[0] - look(output, torch.float32)[0]).abs().max() <= 1e-4
    rotations = stored_rotations(artifact)
    for layer, value in values.items():
        side = "value"
        if f"layers.{layer}.latent.rotation" in rotations:
            side, norms = "latent", load_file(folder / "model.safetensors")
            # The copy caches latents without the weights of their norm.
            latents = sorted(name for name in norms if name.endswith("kv_a_layernorm.weight"))
            value = value / norms[latents[[*values].index(layer)]].double()
        rotation = rotations[f"layers.{layer}.{side}.rotation"].double()
        size = value.abs().max()
        assert (rotated[layer] - value @ rotation).abs().max() <= 2e-6 * size
        assert (rotated[layer] - value @ rotation.mT).abs().max() > 0.1 * size, (
            "R and its transpose must differ"
        )


def absorb_and_check(folder: Path, output: Path, **changes) -> tuple[Artifact, Path]:
    """A data-free artifact of a saved model, and the copy that absorbed it."""
    artifact = rotate(folder, **changes)
    absorbed = absorb(artifact, str(folder), output)
    check(folder, artifact, absorbed)
    return artifact, absorbed


@families(CALIBRATED)
def test_every_family_absorbs_or_says_why_not(name, tmp_path):
    model = architectures.build(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "kv_a_layernorm" in parameter_name:  # ones would hide what becomes of them
                parameter.uniform_(0.5, 2)
    model.save_pretrained(tmp_path / name)
    artifact = rotate(tmp_path / name)
    if name in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[name]) as refusal:
            absorb(artifact, str(tmp_path / name), tmp_path / "absorbed")
        assert refusal.value.hint
        assert not (tmp_path / "absorbed").exists()
        return
    output = absorb(artifact, str(tmp_path / name), tmp_path / "absorbed")
    assert output == tmp_path / "absorbed"
    check(tmp_path / name, artifact, output)


def save(folder: Path, kind: str, dtype=torch.float32, shards: str = "5GB", **changes) -> Path:
    """A random model whose biases and norms are not what initialisation makes of them."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**BASE, **changes})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25).add_(parameter.ndim == 1)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    return folder


@pytest.mark.parametrize("heads", [4, 2, 1], ids="{} KV heads".format)
@pytest.mark.parametrize("pooling", ["head", "layer"])
def test_groups_of_query_heads_biases_and_pooled_rotations(heads, pooling, tmp_path):
    folder = save(tmp_path / "qwen2", "Qwen2", num_key_value_heads=heads)
    artifact, output = absorb_and_check(folder, tmp_path / "out", pooling=pooling)
    assert stored_rotations(artifact)["layers.0.value.rotation"].shape[0] == (
        1 if pooling == "layer" else heads
    )
    before, after = load_file(folder / "model.safetensors"), load_file(output / "model.safetensors")
    changed = {
        name.split(".", 3)[3] for name in before if not torch.equal(before[name], after[name])
    }
    assert changed == {
        "self_attn.v_proj.weight",
        "self_attn.v_proj.bias",
        "self_attn.o_proj.weight",
    }


def test_values_that_are_scaled_can_be_rotated(tmp_path):
    """MiMo multiplies them by a number, which commutes."""
    torch.manual_seed(0)
    architectures.build("mimo_v2_flash", attention_value_scale=0.7).save_pretrained(
        tmp_path / "mimo"
    )
    absorb_and_check(tmp_path / "mimo", tmp_path / "out")


def test_shards_keep_their_names_their_index_and_where_nothing_changes_their_bytes(tmp_path):
    folder = save(tmp_path / "sharded", "Llama", shards="20KB")
    others = "pytorch_model.bin", "consolidated.safetensors", "x.bin.index.json"
    for name in ("LICENSE", "chat_template.jinja", *others):
        (folder / name).write_text(name)
    (folder / "original").mkdir()
    (folder / "model-00001-of-00002.safetensors.old").write_text("copied, being no weights")
    _, output = absorb_and_check(folder, tmp_path / "out")
    before, after = ({path.name for path in each.iterdir()} for each in (folder, output))
    assert after == before - {*others, "original"} | {RECORD}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    parts = ("self_attn.v_proj.weight", "self_attn.o_proj.weight")
    touched = {file for name, file in index.items() if name.endswith(parts)}
    assert touched < set(index.values())
    for path in output.iterdir():
        if path.name != RECORD:
            same = path.read_bytes() == (folder / path.name).read_bytes()
            assert same == (path.name not in touched), path.name
    for name in touched:
        before, after = (safe_open(path / name, "pt") for path in (folder, output))
        assert before.metadata() == after.metadata()
        assert before.keys() == after.keys()


def test_the_type_of_the_weights_is_kept(tmp_path):
    folder = save(tmp_path / "half", "Llama", torch.bfloat16)
    artifact = rotate(folder)
    output = absorb(artifact, str(folder), tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(output / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    name = "model.layers.0.self_attn.v_proj.weight"
    rotation = stored_rotations(artifact)["layers.0.value.rotation"].double()
    exact = (rotation.mT @ before[name].double().view(2, 16, 64)).flatten(0, 1)
    assert torch.equal(after[name], exact.bfloat16()), "rounded once"
    assert not torch.equal(after[name], before[name])


def test_a_checkpoint_with_another_prefix(tmp_path):
    """Vision models are published under `language_model.model.layers`, and their vision towers have
    layers too."""
    architectures.build("gemma3-vlm").save_pretrained(tmp_path / "vlm")
    names = load_file(tmp_path / "vlm" / "model.safetensors").keys()
    twins = [name for name in names if name.endswith("layers.0.self_attn.v_proj.weight")]
    assert len(twins) == 2, "a layer of the text and one of the vision tower"
    assert "model.language_model.layers.0.self_attn.v_proj.weight" not in twins
    artifact = rotate(tmp_path / "vlm")
    output = absorb(artifact, str(tmp_path / "vlm"), tmp_path / "out")
    vision = next(name for name in twins if "vision" in name)
    assert torch.equal(
        *(load_file(path / "model.safetensors")[vision] for path in (tmp_path / "vlm", output))
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    folder = save_tiny(tmp_path_factory.mktemp("absorb") / "tiny")
    statistics = QUICK.model_copy(update={"data": Data(tokens=1024, length=256)})
    measured = calibrate(Job(str(folder), statistics, folder.with_name("measured"), device="cpu"))
    return SimpleNamespace(folder=folder, artifact=rotate(folder), measured=measured)


def refused(artifact: Artifact, folder: Path, output: Path, match: str) -> str:
    """The hint of a refusal that leaves nothing behind."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(RotationZooError, match=match) as refusal:
        absorb(artifact, str(folder), output)
    assert sorted(output.parent.iterdir()) == before
    return refusal.value.hint


def test_nothing_is_absorbed_twice(made, tmp_path):
    output = absorb(made.artifact, str(made.folder), tmp_path / "out")
    record = json.loads((output / RECORD).read_text())
    assert record["artifact"] == made.artifact.identity
    assert record["model"]["id"] == made.folder.name
    assert refused(
        made.artifact, output, tmp_path / "again", "carry the value rotation of an artifact"
    )
    (output / RECORD).unlink()
    assert absorb(made.artifact, str(output), tmp_path / "again"), "only the record told"
    assert refused(made.measured, output, tmp_path / "third", "made for other weights")


def test_what_does_not_fit_is_refused(made, tmp_path, monkeypatch):
    other = save_tiny(tmp_path / "other", rope_theta=5e5)
    assert "rotationzoo calibrate" in refused(
        made.artifact, other, tmp_path / "out", "made for another model or config"
    )
    twin = save_tiny(tmp_path / "twin")
    model = transformers.AutoModelForCausalLM.from_pretrained(twin)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    model.save_pretrained(twin)
    assert refused(made.measured, twin, tmp_path / "out", "made for other weights")
    # Where the weights are not here yet when the config is compared.
    with monkeypatch.context() as hub:
        hub.setattr("rotationzoo.engines.absorb.verify", lambda *_: Verification([], None, []))
        assert refused(made.measured, twin, tmp_path / "out", "made for other weights")
    (tmp_path / "there").mkdir()
    assert "--output" in refused(made.artifact, made.folder, tmp_path / "there", "is there already")
    blocks = dict(weight_block_size=[128, 128], activation_scheme="dynamic")
    set_quantization(twin, quant_method="fp8", **blocks)
    assert refused(made.artifact, twin, tmp_path / "out", "quantized in blocks")


def test_a_model_that_needs_its_weights_to_run_is_refused(made, tmp_path, monkeypatch):
    monkeypatch.setattr("rotationzoo.engines.absorb.geometry_on_meta", lambda model: None)
    assert refused(
        made.artifact, made.folder, tmp_path / "out", "cannot be checked without its weights"
    )


def test_a_damaged_artifact_or_checkpoint_is_refused(made, tmp_path):
    broken = save_tiny(tmp_path / "broken")
    artifact = rotate(broken)
    content = load_file(broken / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    weight = content.pop(name)
    for wrong in (
        {},
        {name.replace("o_proj", "out_proj"): weight},
        {f"one.{name}": weight, f"two.{name}": weight.clone()},
        {name: weight.to(torch.int32)},
        {name: weight[:, :-1].contiguous()},
    ):
        save_file(content | wrong, broken / "model.safetensors")
        assert refused(artifact, broken, tmp_path / "out", f"have no {name} of shape")
    save_file(content | {f"one.{name}": weight}, broken / "model.safetensors")
    assert absorb(artifact, str(broken), tmp_path / "prefixed"), (
        "of another prefix, but not to be mistaken"
    )
    save_file(content | {name: weight}, broken / "model.safetensors")
    damaged = stored_rotations(artifact)
    damaged["layers.0.value.rotation"][0, 0, 0] += 1
    save_file(damaged, artifact.folder / ROTATIONS)
    reopened = Artifact.open(artifact.folder)  # an open artifact knows the hashes of its files
    assert refused(reopened, broken, tmp_path / "out", "its sha256 differs")


def test_a_full_disk_leaves_nothing_behind(made, tmp_path, monkeypatch):
    real, copied = shutil.copyfile, []

    def full(source, target):
        if Path(target).suffix == ".safetensors":
            raise OSError(28, "No space left on device")
        copied.append(target)
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    assert "make room" in refused(
        made.artifact, made.folder, tmp_path / "out", "No space left on device"
    )
    assert copied


def test_the_command_absorbs_and_serves_what_it_wrote(made, inside):
    """The whole journey: the model with the rotation in its weights, then the keys' files for an
    engine that serves it."""
    folder = made.measured.folder
    words = "--absorb", made.folder, "-o", "absorbed"
    assert ok(inside("export", folder, *words, "--json")) == {"model": "absorbed"}
    served = ok(inside("export", folder, "--to", "sglang", "--absorbed", "absorbed", "--json"))
    assert f"--model-path {inside.folder / 'absorbed'}" in served["command"][0]
    assert "v_rotation_identity.pt" in served["files"]
    other = inside("export", made.artifact.folder, "--to", "mlx", "--absorbed", "absorbed")
    assert "of another artifact" in other.stderr
    assert inside("export", folder, "--absorb", made.folder, "--pooled").returncode == 2
    assert "is there already" in inside("export", folder, *words).stderr
