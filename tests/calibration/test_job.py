"""The whole job through the library: artifact, resuming, offload, refusals."""

import io
import json
import shutil
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import architectures
from support.models import save_tiny

from rotationzoo.artifact.layout import rotations_from, statistics_from, statistics_tensors
from rotationzoo.artifact.spectra import summarize
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.writer import write_artifact
from rotationzoo.calibration import job as jobs
from rotationzoo.calibration import plan as plans
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.identity import differences
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job, plan
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import average
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.source import find, weights_fingerprint
from rotationzoo.recipe import PRESETS, Data, Recipe, Search, override
from rotationzoo.storage.files import sha256
from rotationzoo.text.rows import read_corpus

SMALL = Data(tokens=2048, length=256)
RECIPE = Recipe(data=SMALL)


def job(model, folder, recipe=RECIPE, **changes) -> Job:
    return Job(
        model=str(model), recipe=recipe, output=Path(folder) / "out", device="cpu", **changes
    )


def rotation_bytes(artifact: Artifact) -> bytes:
    return (artifact.folder / "rotations.safetensors").read_bytes()


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory) -> Artifact:
    return calibrate(job(tiny, tmp_path_factory.mktemp("made")))


@pytest.fixture
def copy(made, tmp_path) -> Artifact:
    """An artifact to damage."""
    return Artifact.open(Path(shutil.copytree(made.folder, tmp_path / "copy")))


# ---- what is written


def test_the_files_keep_their_contract(made):
    assert {p.name for p in made.folder.iterdir()} == {
        "rotations.safetensors", "statistics.safetensors", "manifest.json", "README.md"
    }  # fmt: skip
    assert {p.name for p in made.folder.parent.iterdir()} == {"out"}, (
        "no checkpoint or temporary folder is left"
    )
    rotations, statistics, manifest = (
        made.rotation_tensors(),
        made.statistics_tensors(),
        made.content,
    )
    assert manifest["schema"] == 1
    for layer in range(2):
        for side in ("key", "value"):
            assert rotations[f"layers.{layer}.{side}.rotation"].shape == (2, 16, 16)
            assert (rotations[f"layers.{layer}.{side}.eigenvalues"].diff() >= 0).all()
            assert (
                rotations[f"layers.{layer}.{side}.clip"].tolist()
                == [0.96 if side == "key" else 0.92] * 2
            )
            assert statistics[f"layers.{layer}.{side}.count"].item() == 8 * (256 - 64)
        for kind in ("query", "output"):
            assert statistics[f"layers.{layer}.{kind}.second_moment"].dtype == torch.float64
            assert statistics[f"layers.{layer}.{kind}.count"].item() == 2 * 8 * 256
    calibration = manifest["calibration"]
    assert (calibration["source"], calibration["tokens"], calibration["rows"]) == (
        "bundled",
        2048,
        8,
    )
    assert len(calibration["fingerprint"]) == len(manifest["model"]["weights_fingerprint"]) == 64
    assert (
        Recipe.model_validate(manifest["recipe"]).hash == manifest["recipe_sha256"] == RECIPE.hash
    )
    assert made.identity == manifest["files"]["rotations.safetensors"]["sha256"]
    assert (made.folder / "README.md").read_text().startswith("---\nlibrary_name: rotationzoo")


def test_two_runs_write_the_same_bytes(made, tiny, tmp_path):
    assert rotation_bytes(calibrate(job(tiny, tmp_path))) == rotation_bytes(made)


def test_a_finished_job_is_not_done_again(made, tiny, monkeypatch):
    monkeypatch.setattr(jobs, "collect", lambda *_: pytest.fail("calibrated again"))
    again = calibrate(job(tiny, made.folder.parent))
    assert again.identity == made.identity


def test_the_rotations_can_be_refitted_without_the_model(made):
    """U from the stored rotation diagonalises the stored statistic, whose eigenvalues are the
    stored ones."""
    statistics, rotations = made.statistics_tensors(), made.rotation_tensors()
    values = torch.linalg.eigvalsh(statistics["layers.1.query.second_moment"])
    assert torch.allclose(values.float(), rotations["layers.1.key.eigenvalues"], rtol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_makes_a_sound_artifact(name, tiny, tmp_path):
    recipe = PRESETS[name].model_copy(update={"data": SMALL})
    if recipe.search is not None:
        recipe = recipe.model_copy(
            update={"sink": 8, "recent": 16, "search": Search(steps=2, queries=4)}
        )
    artifact = calibrate(job(tiny, tmp_path, recipe))
    found = verify(artifact, str(tiny))
    assert found.ok, found.problems
    assert found.orthogonality_error < 1e-6  # measured 6e-8
    assert (artifact.statistics_tensors() is None) == (name in ("hadamard", "identity", "random"))
    heads = 1 if recipe.pooling == "layer" else 2
    assert artifact.rotation_tensors()["layers.0.key.rotation"].shape == (heads, 16, 16)
    assert len(summarize(artifact)) == 2


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("base", ["oscar", "hadamard"])
def test_a_recipe_that_centers_keeps_the_mean(base, side, tiny, tmp_path):
    recipe = PRESETS[base].model_copy(
        update={f"center_{side}s": True, "data": Data(tokens=512, length=256)}
    )
    artifact = calibrate(Job(str(tiny), recipe, tmp_path / "out", device="cpu"))
    assert verify(artifact).ok, verify(artifact).problems
    rotations, statistics = artifact.rotation_tensors(), artifact.statistics_tensors()
    for layer in (0, 1):
        assert torch.equal(
            rotations[f"layers.{layer}.{side}.mean"],
            statistics[f"layers.{layer}.{side}.mean"].float(),
        )
    assert f"({side[0]} - mean) R_{side[0].upper()}" in (artifact.folder / "README.md").read_text()
    rotations[f"layers.1.{side}.mean"] += 1
    changed = write_artifact(
        artifact.folder,
        rotations_from(rotations),
        statistics_from(statistics),
        dict(artifact.content),
    )
    assert verify(changed).problems == [f"{side} mean not that of the statistics: layer 1"]


def test_the_composition_of_imported_files_cannot_be_calibrated(tiny, tmp_path):
    recipe = PRESETS["oscar"].model_copy(update={"composition": "given"})
    with pytest.raises(RotationZooError, match="stands for imported matrices"):
        calibrate(Job(str(tiny), recipe, tmp_path / "out", device="cpu"))


def test_random_rotations_differ_by_head_and_layer(tiny, tmp_path):
    rotations = calibrate(job(tiny, tmp_path, PRESETS["random"])).rotation_tensors()
    matrices = [m for n, t in rotations.items() if n.endswith("rotation") for m in t]
    assert len({m.numpy().tobytes() for m in matrices}) == 8


# ---- stopping and going on


@pytest.mark.parametrize("name", ["oscar", "oscar-v1"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_an_interrupted_job_goes_on_to_the_same_bytes(name, stop, tiny, tmp_path):
    recipe = PRESETS[name].model_copy(update={"data": SMALL})
    whole = calibrate(job(tiny, tmp_path / "whole", recipe, batch=4 if name == "oscar-v1" else 2))
    passes = []

    def interrupt(stage, done, total):
        if stage == "calibrating":
            passes.append(done)
            if done == stop:
                raise KeyboardInterrupt

    stopped = job(tiny, tmp_path / "stopped", recipe, batch=4 if name == "oscar-v1" else 2)
    with pytest.raises(KeyboardInterrupt):
        calibrate(stopped, interrupt)
    assert [p.name for p in stopped.output.parent.iterdir()] == ["out.checkpoint.safetensors"]
    resumed = calibrate(
        stopped, lambda stage, done, total: stage == "calibrating" and passes.append(done)
    )
    assert passes[stop] in range(2, stop + 2), "the checkpoint was not used"
    assert rotation_bytes(resumed) == rotation_bytes(whole)
    assert (resumed.folder / "statistics.safetensors").read_bytes() == (
        whole.folder / "statistics.safetensors"
    ).read_bytes()
    assert [p.name for p in stopped.output.parent.iterdir()] == ["out"]


def test_a_checkpoint_of_another_job_is_refused_until_restart(tiny, tmp_path):
    def interrupt(stage, done, total):
        if stage == "calibrating" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(job(tiny, tmp_path, batch=2), interrupt)
    with pytest.raises(RotationZooError, match="of another job: batch differ"):
        calibrate(job(tiny, tmp_path, batch=4))
    calibrate(job(tiny, tmp_path, batch=4, restart=True))


def test_another_recipes_work_is_kept_until_restart(tiny, tmp_path):
    first = calibrate(job(tiny, tmp_path))
    other = override(RECIPE, seed=2)
    with pytest.raises(RotationZooError, match="holds the work of another recipe"):
        calibrate(job(tiny, tmp_path, other))
    assert verify(first).ok
    assert calibrate(job(tiny, tmp_path, other, restart=True)).identity != first.identity


def test_a_folder_of_something_else_is_never_replaced(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("...")
    for restart in (False, True):
        with pytest.raises(RotationZooError, match="is no artifact"):
            calibrate(job(tiny, tmp_path, restart=restart))
    (tmp_path / "out" / "manifest.json").write_text('{"name": "a browser extension"}')
    with pytest.raises(RotationZooError, match="damaged"):
        calibrate(job(tiny, tmp_path, restart=True))
    assert (tmp_path / "out" / "thesis.tex").exists()
    artifact = calibrate(job(tiny, tmp_path / "other"))
    (artifact.folder / "notes.md").write_text("mine")
    with pytest.raises(RotationZooError, match=r"also holds notes\.md"):
        calibrate(job(tiny, tmp_path / "other", restart=True))


def test_an_interrupted_restart_goes_on(tiny, tmp_path):
    """The old artifact stays until the new one is whole, and the printed command goes on with the
    new one."""

    def interrupt(stage, done, total):
        if stage == "calibrating" and done == 2:
            raise KeyboardInterrupt

    first = calibrate(job(tiny, tmp_path, batch=2))
    other = PRESETS["oscar-v1"].model_copy(update={"data": SMALL})
    whole = calibrate(job(tiny, tmp_path / "whole", other, batch=2))
    with pytest.raises(KeyboardInterrupt):
        calibrate(job(tiny, tmp_path, other, batch=2, restart=True), interrupt)
    assert verify(first).ok
    passes = []
    resumed = calibrate(
        job(tiny, tmp_path, other, batch=2), lambda stage, done, total: passes.append((stage, done))
    )
    assert ("calibrating", 1) not in passes
    assert resumed.identity == whole.identity
    assert {path.name for path in tmp_path.iterdir()} == {"out", "whole"}


def test_an_artifact_that_cannot_be_replaced_is_put_back(made, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(made.folder, tmp_path / "out"))
    rename = Path.rename

    def fail(self, target):
        if self.name == ".out.partial":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RotationZooError, match="cannot be written: No space left"):
        write_artifact(folder, made.rotations, None, made.content)
    monkeypatch.undo()
    assert verify(Artifact.open(folder)).ok
    folder.rename(tmp_path / ".out.old")  # as a kill between the two renames leaves it
    assert verify(Artifact.open(folder)).ok


def test_the_config_is_part_of_the_job(tiny, tmp_path):
    """The same weights with other RoPE scaling are another model."""
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    first = calibrate(job(model, tmp_path))
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(RotationZooError, match="another job: config differ"):
        calibrate(job(model, tmp_path))
    assert "another model or config" in verify(first, str(model)).problems[0]


def test_weights_that_are_not_complete(tiny, tmp_path):
    def spoil(name, change):
        folder = Path(shutil.copytree(tiny, tmp_path / name))
        change(folder / "model.safetensors")
        with pytest.raises(RotationZooError) as caught:
            calibrate(job(folder, tmp_path))
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    def drop_one(path):
        weights = load_file(path)
        weights.pop("model.layers.1.self_attn.q_proj.weight")
        save_file(weights, path, metadata={"format": "pt"})

    assert "model.layers.1.self_attn.q_proj.weight is missing" in spoil("dropped", drop_one)
    assert "could not be loaded" in spoil(
        "cut", lambda path: path.write_bytes(path.read_bytes()[:-1000])
    )
    assert "no safetensors file" in spoil(
        "pointer", lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n")
    )
    assert "no safetensors file" in spoil("empty", lambda path: path.write_bytes(b""))
    assert "no complete safetensors weights" in spoil("gone", lambda path: path.unlink())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 0),
        ("hidden_size", "wide"),
        ("model_type", "nonesuch"),
        ("model_type", None),
    ],
)
def test_damaged_configs_get_a_sentence(key, value, tiny, tmp_path):
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(RotationZooError) as caught:
        calibrate(job(model, tmp_path))
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_code_of_a_model_is_never_run(tiny, tmp_path, monkeypatch):
    """Nor asked about: the question could be answered by whatever stands on stdin."""
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    for name, key in {
        "config.json": "AutoConfig",
        "tokenizer_config.json": "AutoTokenizer",
    }.items():
        content = json.loads((model / name).read_text())
        auto_map = {
            key: ["code.C", None] if key == "AutoTokenizer" else "code.C",
            "AutoModelForCausalLM": "code.C",
        }
        (model / name).write_text(json.dumps({**content, "auto_map": auto_map}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    calibrate(job(model, tmp_path))
    assert not (tmp_path / "ran").exists()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "brand-new"}))
    with pytest.raises(RotationZooError, match="does not know the model type 'brand-new'"):
        calibrate(job(model, tmp_path, restart=True))
    assert not (tmp_path / "ran").exists()


# ---- which job it is


def stopped_after_one_batch(job: Job) -> Job:
    def interrupt(stage, done, total):
        if stage == "calibrating" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(job, interrupt)
    return job


@pytest.mark.parametrize("finished", [True, False], ids=["artifact", "checkpoint"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"budget": 5.0}, "budget"),
        ({"device_map": "auto"}, "device_map"),
        ({"device_map": "auto", "max_memory": "cpu=9GB"}, "device_map, max_memory"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"batch": 1}, "batch"),
    ],
)
def test_another_job_is_told_by_what_differs(change, named, finished, tiny, tmp_path):
    options = {"dtype": "float32", "batch": 2}
    first = job(tiny, tmp_path, **options)
    calibrate(first) if finished else stopped_after_one_batch(first)
    what = "holds the work of another job" if finished else "is of another job"
    with pytest.raises(RotationZooError, match=f"{what}: {named} differ"):
        calibrate(job(tiny, tmp_path, **{**options, **change}))


def test_threads_are_those_that_torch_computes_with(tiny, tmp_path):
    """Sums depend on how many threads they are split between, and not on how many cores there
    are."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        artifact = calibrate(job(tiny, tmp_path))
        assert artifact.content["run"]["threads"] == 3
        assert artifact.content["identity"]["threads"] == "3"
        torch.set_num_threads(1)
        with pytest.raises(RotationZooError, match="another job: threads differ"):
            calibrate(job(tiny, tmp_path))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "device", "dtype"),
    [
        ({}, "x86_64 CPU, 64 threads", "torch.float32"),
        ({"budget": 5.0}, "x86_64 CPU, 64 threads", "torch.float32, 5.0 minutes"),
        (
            {"device_map": "auto", "dtype": "float32"},
            "x86_64 CPU, 64 threads, auto ",
            "torch.float32",
        ),
        (
            {
                "device_map": "auto",
                "max_memory": "0=20GiB,cpu=60GiB",
                "dtype": "float32",
                "budget": 0.5,
            },
            "x86_64 CPU, 64 threads, auto 0=20GiB,cpu=60GiB",
            "torch.float32, 0.5 minutes",
        ),
    ],
)
def test_work_of_an_earlier_version_is_the_same_job(
    options, device, dtype, tiny, tmp_path, monkeypatch
):
    """It had the budget in `dtype`, the device map in `device`, and the machine's cores for
    threads."""
    monkeypatch.setattr(jobs, "device_name", lambda device: "x86_64 CPU")
    mine = job(tiny, tmp_path, **options)
    source = find(str(tiny))
    text = read_corpus(SMALL, loading.load_tokenizer(source))
    ours = jobs._identity(mine, source, text)
    new = ("threads", "device_map", "max_memory", "budget")
    theirs = {key: value for key, value in ours.items() if key not in new} | {
        "device": device,
        "dtype": dtype,
    }
    assert differences(theirs, ours) == []
    assert differences(theirs, ours | {"budget": "7.0"}) == ["budget"]
    assert differences(theirs, ours | {"device_map": "balanced"}) == ["device_map"]
    assert differences(theirs | {"device": "aarch64" + device[6:]}, ours) == ["device"]
    assert differences(
        {**ours, "device": "NVIDIA H100 80GB HBM3, auto "}, ours | {"device_map": "auto"}
    ) == ["device"]


# ---- models that do not fit one device


def test_weights_on_disk_give_the_same_statistics(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model", num_hidden_layers=4)
    plain = calibrate(job(model, tmp_path / "plain", dtype="float32"))
    places = []
    load = loading.load
    monkeypatch.setattr(
        loading,
        "load",
        lambda *a: (loaded := load(*a), places.extend(loaded.hf_device_map.values()))[0],
    )
    # Nothing but the embedding would fit in main memory: accelerate fetches the layers from disk
    # one by one.
    spread = calibrate(
        job(model, tmp_path / "spread", dtype="float32", device_map="auto", max_memory="cpu=150KB")
    )
    assert "disk" in places
    statistics = spread.statistics_tensors()
    for name, tensor in plain.statistics_tensors().items():
        assert torch.equal(tensor, statistics[name])
    assert rotation_bytes(plain) == rotation_bytes(spread)


def test_weights_in_main_memory_give_the_same_statistics(tiny):
    """As on a GPU too small for the model: the weights are elsewhere, and each layer's are fetched
    when it runs."""
    ids = [torch.randint(2048, (2, 100), generator=torch.Generator().manual_seed(0))]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    geometry = geometry_of(plain)
    expected = statistics_tensors(average(collect(plain, geometry, ids, RECIPE)))
    fetched = accelerate.cpu_offload(
        transformers.AutoModelForCausalLM.from_pretrained(tiny), execution_device="cpu"
    )
    assert fetched.device.type == "meta"
    for name, tensor in statistics_tensors(
        average(collect(fetched, geometry, ids, RECIPE))
    ).items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize(
    "name", ["gemma3-vlm", "qwen3_5-vlm", "gemma4", "gpt_oss", "mimo_v2_flash", "lfm2"]
)
def test_other_families_from_disk_to_a_sound_artifact(name, tiny, tmp_path):
    """Saved as their makers save them and loaded by name: vision towers, shared caches, sinks,
    unequal head dimensions."""
    changes = {"vocab_size": 2048, "max_position_embeddings": 512}
    if name == "gemma4":
        changes["vocab_size_per_layer_input"] = 2048
    if name.endswith("vlm"):
        text = architectures.config(name).text_config.to_dict()
        changes = {"text_config": text | changes}
    architectures.build(name, **changes).save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, tmp_path / "model")
    artifact = calibrate(job(tmp_path / "model", tmp_path))
    assert [layer.layer for layer in summarize(artifact)] == list(
        architectures.EXPECTED[name].layers
    )
    assert verify(artifact, str(tmp_path / "model")).ok


def quantize_to_fp8(folder: Path) -> None:
    """Store the projections in blocks of FP8 with their scales, as released FP8 checkpoints do."""
    stored = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = weight.bfloat16()
            continue
        scale = weight.abs().max() / 448  # 128 x 128 at most: one block
        stored[name] = (weight / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale.view(1, 1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    blocks = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "quantization_config": blocks})
    )


def test_fp8_weights(tmp_path):
    """Only activations are read, so quantized weights need nothing of us."""
    model = save_tiny(tmp_path / "model", hidden_size=128, intermediate_size=128, head_dim=32)
    plain = calibrate(job(model, tmp_path / "plain"))
    quantize_to_fp8(model)
    for dtype in ("auto", "float32"):
        quantized = calibrate(job(model, tmp_path / dtype, dtype=dtype))
        assert quantized.content["run"]["dtype"] == "bfloat16"
        assert verify(quantized, str(model)).ok
        for name, tensor in quantized.statistics_tensors().items():
            exact = plain.statistics_tensors()[name].double()
            if name.endswith("second_moment"):
                assert 1e-6 < (tensor - exact).norm() / exact.norm() < 0.2  # measured .01 to .10


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"]
)
@pytest.mark.parametrize("name", ["qwen3", "gemma3-vlm"])
@pytest.mark.parametrize(
    "implementation", ["someone/kernel", "kernels-community/flash-attn2", "flash_attention_2"]
)
def test_a_config_names_no_code_to_fetch(key, name, implementation, tiny, tmp_path, monkeypatch):
    """Not of kernels on the hub, for the model nor for its text part."""
    for place in (
        "modeling_utils.lazy_import_flash_attention",
        "integrations.hub_kernels.load_and_register_attn_kernel",
    ):
        monkeypatch.setattr(
            f"transformers.{place}", lambda *_, **__: pytest.fail("asked for a kernel")
        )
    changes = {"vocab_size": 2048, "max_position_embeddings": 512}
    if name.endswith("vlm"):
        changes = {"text_config": architectures.config(name).text_config.to_dict() | changes}
    folder = tmp_path / "model"
    architectures.build(name, **changes).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, folder)
    expected = calibrate(job(folder, tmp_path / "expected"))
    config = json.loads((folder / "config.json").read_text())
    nested = {
        part: {**config[part], key: implementation}
        for part in ("text_config", "vision_config")
        if part in config
    }
    (folder / "config.json").write_text(json.dumps({**config, **nested, key: implementation}))
    source = find(str(folder))
    loaded = loading.load_config(source)
    for model in (
        loading.on_meta(loaded, name),
        loading.load(source, loaded, "cpu", torch.float32),
    ):
        used = {
            module.config._attn_implementation
            for module in model.modules()
            if hasattr(module, "config")
        }
        assert used <= {"sdpa", "eager"}
    assert rotation_bytes(calibrate(job(folder, tmp_path / "made"))) == rotation_bytes(expected)


def test_a_soft_cap_is_never_dropped(tmp_path):
    """sdpa, which transformers 5.17 chooses for Gemma 2, would ignore it without a word."""
    architectures.build("gemma2", attn_implementation=None).save_pretrained(tmp_path)
    source = find(str(tmp_path))
    config = loading.load_config(source)
    for model in (
        loading.on_meta(config, "gemma2"),
        loading.load(source, config, "cpu", torch.float32),
    ):
        assert model.config._attn_implementation == "eager"


def test_a_model_that_fails_when_it_runs_gets_a_sentence(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:100].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(RotationZooError, match="fails when it runs: index out of range"):
        calibrate(job(folder, tmp_path))


# ---- what is known before


def test_the_plan_reads_only_the_config(tiny, tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(tiny / "config.json", tmp_path / "model")
    found = plan(job(tmp_path / "model", tmp_path))
    assert [(layer.kv_heads, layer.key_dim) for layer in found.geometry] == [(2, 16)] * 2
    assert found.weights_bytes > 0
    with pytest.raises(RotationZooError, match="tokenizer"):
        calibrate(job(tmp_path / "model", tmp_path))


@pytest.mark.parametrize("recipe", ["oscar", "hadamard"])
def test_a_model_that_cannot_run_on_meta_is_looked_at_on_its_weights(
    recipe, tiny, tmp_path, monkeypatch
):
    recipe = PRESETS[recipe].model_copy(update={"data": SMALL})
    expected = calibrate(job(tiny, tmp_path / "expected", recipe))
    monkeypatch.setattr(plans, "geometry_on_meta", lambda model: None)
    found = plan(job(tiny, tmp_path, recipe))
    assert (found.geometry, found.refusal) == (None, None)
    artifact = calibrate(job(tiny, tmp_path, recipe))
    assert artifact.content["geometry"] == expected.content["geometry"]
    assert rotation_bytes(artifact) == rotation_bytes(expected)


def test_the_planned_sizes_are_those_that_come_out(made, tiny, tmp_path):
    found = plan(job(tiny, tmp_path))
    written = sum(file["size"] for file in made.content["files"].values())
    assert (
        found.artifact_bytes <= written <= 1.5 * found.artifact_bytes + 10_000
    )  # headers and means besides


@pytest.mark.parametrize("needed", ["nothing", "a search", "text of its own"])
def test_a_checkpoint_without_a_head_is_good_for_statistics_alone(needed, tiny, tmp_path):
    """A head that is not in the weights would be random, and clip ratios or text chosen by it."""
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    recipe = {
        "nothing": RECIPE,
        "a search": RECIPE.model_copy(
            update={"sink": 8, "recent": 16, "search": Search(steps=1, queries=4)}
        ),
        "text of its own": RECIPE.model_copy(
            update={"data": Data(source="self", tokens=512, length=128, prompt_tokens=16)}
        ),
    }[needed]
    if needed == "nothing":
        expected = calibrate(job(tiny, tmp_path / "expected"))
        assert rotation_bytes(calibrate(job(folder, tmp_path))) == rotation_bytes(expected)
        return
    with pytest.raises(RotationZooError, match=r"lm_head\.weight is missing from its weights"):
        calibrate(job(folder, tmp_path, recipe))


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("auto", 4)])
def test_a_plan_counts_weights_in_the_type_that_they_are_loaded_in(dtype, item, tiny, tmp_path):
    parameters = sum(t.numel() for t in load_file(tiny / "model.safetensors").values())
    spread = (
        {"device_map": "auto"} if dtype == "auto" else {}
    )  # the checkpoint's own type, here float32
    sizes = [
        plan(job(tiny, tmp_path, RECIPE, dtype=name, **spread)).peak_memory_bytes
        for name in (dtype, "float32")
    ]
    assert (
        sizes[1] - sizes[0] >= 2 * parameters if item == 2 else abs(sizes[0] / sizes[1] - 1) < 1e-3
    )


# ---- verify


def test_verify_finds_each_kind_of_damage(copy):
    def problems(change) -> str:
        tensors = copy.rotation_tensors()
        change(tensors)
        save_file(tensors, copy.folder / "rotations.safetensors")
        files = copy.content["files"]
        honest = {**files, "rotations.safetensors": _known(copy.folder / "rotations.safetensors")}
        found = verify(Artifact(copy.folder, {**copy.content, "files": honest}))
        assert not found.ok
        return "; ".join(found.problems)

    original = copy.rotation_tensors()

    def swap(tensors):
        for name in list(original):
            if ".key." in name:
                tensors[name], tensors[name.replace(".key.", ".value.")] = (
                    original[name.replace(".key.", ".value.")].clone(),
                    original[name].clone(),
                )

    assert "key and value swapped: layers 0, 1" in problems(swap)
    save_file(original, copy.folder / "rotations.safetensors")
    assert "key rotation missing: layer 1" in problems(lambda t: t.pop("layers.1.key.rotation"))
    save_file(original, copy.folder / "rotations.safetensors")
    assert "value rotation not finite: layer 0" in problems(
        lambda t: t["layers.0.value.rotation"].fill_(float("nan"))
    )
    save_file(original, copy.folder / "rotations.safetensors")
    assert "key rotation not orthogonal: layer 0" in problems(
        lambda t: t["layers.0.key.rotation"].mul_(1.001)
    )
    save_file(original, copy.folder / "rotations.safetensors")

    def other_layer(tensors):
        tensors["layers.0.key.rotation"] = original["layers.1.key.rotation"].clone()

    assert "do not come from the statistics" in problems(other_layer)
    save_file(original, copy.folder / "rotations.safetensors")
    assert "belong to no layer" in problems(
        lambda t: t.update({"layers.9.key.rotation": t["layers.0.key.rotation"].clone()})
    )


def _known(path: Path) -> dict:
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def test_verify_checks_what_no_statistics_back(tiny, tmp_path):
    artifact = calibrate(job(tiny, tmp_path, PRESETS["random"]))
    tensors = artifact.rotation_tensors()

    def problems(tensors, **manifest):
        save_file(tensors, artifact.folder / "rotations.safetensors")
        files = {"rotations.safetensors": _known(artifact.folder / "rotations.safetensors")}
        return "; ".join(
            verify(
                Artifact(artifact.folder, {**artifact.content, "files": files, **manifest})
            ).problems
        )

    assert problems(tensors) == ""
    swapped = {
        n.replace(".key.", ".X.").replace(".value.", ".key.").replace(".X.", ".value."): t
        for n, t in tensors.items()
    }
    assert "key rotation not the one that random makes: layers 0, 1" in problems(swapped)
    clipped = {
        n: -3 * torch.ones_like(t) if n == "layers.1.key.clip" else t for n, t in tensors.items()
    }
    assert "key clip ratio not that of the recipe: layer 1" in problems(clipped)
    edited = {**artifact.content["recipe"], "recent": 8}
    assert "recipe in the manifest is not the one that was used" in problems(tensors, recipe=edited)
    assert "geometry in the manifest is damaged" in problems(tensors, geometry=[{}])
    (artifact.folder / "rotations.safetensors").unlink()
    found = verify(artifact)
    assert found.orthogonality_error is None
    assert "rotations.safetensors is missing" in found.problems


def test_damaged_manifests_get_a_sentence(copy):
    for content in (
        "{",
        "[]",
        '{"schema": 1}',
        '{"schema": 9}',
        json.dumps({**copy.content, "geometry": None}),
    ):
        (copy.folder / "manifest.json").write_text(content)
        with pytest.raises(RotationZooError):
            Artifact.open(copy.folder)


def test_verify_finds_a_flipped_bit(copy):
    path = copy.folder / "statistics.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    assert verify(copy).problems == [
        "statistics.safetensors is not the file that was written: its sha256 differs"
    ]


def test_verify_knows_the_model(made, tiny, tmp_path):
    assert verify(made, str(tiny)).ok
    other = save_tiny(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][-1, -1] += 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert "made for other weights" in verify(made, str(other)).problems[0]
    (other / "model.safetensors").unlink()
    assert verify(made, str(other)).ok, "with the config alone nothing tells them apart"
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert "made for another model" in verify(made, str(other)).problems[0]


def test_the_fingerprint_does_not_depend_on_sharding(tiny, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    prints = [weights_fingerprint(find(str(folder))) for folder in (tiny, tmp_path / "sharded")]
    assert prints[0] == prints[1]
