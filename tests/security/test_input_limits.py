"""Input that asks for too much time or memory is refused before anything is read or built."""

import json
import os
import resource
import shutil
import signal
import struct
from pathlib import Path

import pytest
import torch
from support.cases import quick_first
from support.command_line import edited_manifest, refused, succeeded
from support.models import demo_tokenizer, save_tiny, write_jsonl
from support.oscar_files import gguf_bytes, gguf_field

from rotationzoo.errors import RotationZooError
from rotationzoo.model.source import find, license_of, weights_fingerprint
from rotationzoo.recipe.loading import load
from rotationzoo.text import chats
from rotationzoo.text.chats import ChatTemplate

PROMPT = ("generate", "demo", "--rotations", "none", "--max-new-tokens", "2")
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATES = {
    "loops": LOOP,
    "multiplies": "{% set x = ('a' * 99999) * 99999 %}{{ x | length }}",
    "multiplies a constant": "{{ 'a' * 9999999999 }}",
    "writes much": "{{ 'a ' * 2000000 }}",
}
BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
MERGE = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@pytest.fixture(autouse=True)
def within(monkeypatch):
    """A test that would take minutes or all memory fails after 40 seconds or 3 GiB."""

    def give_up(*_):
        raise AssertionError("it takes too long")

    # What never ends is given up soon; what is slow here ends far sooner than that.
    monkeypatch.setattr(chats, "_SECONDS", 1.5)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + (3 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(40)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


# ---- prompts


@pytest.mark.hostile("size")
@pytest.mark.parametrize("chat", quick_first([[], ["--chat"]]), ids=["text", "chat"])
def test_a_prompt_has_at_most_what_the_model_can_read(inside, chat):
    (inside.folder / "prompt").write_bytes(b"to be or not to be " * 900_000)
    assert "has more than 16 MiB" in refused(inside(*PROMPT, "--file", "prompt", *chat))
    (inside.folder / "prompt").write_bytes(b"to be or not to be " * 60_000)
    error = refused(inside(*PROMPT, "--file", "prompt"))
    assert "tokens and 2 new ones exceed the 8,192 positions of demo" in error


# ---- chat templates


@pytest.mark.hostile("size")
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_has_limits(inside, monkeypatch, template):
    monkeypatch.setattr(chats, "_SECONDS", 0.2)  # what is refused need not be waited for
    model = save_tiny(inside.folder / "model")
    (model / "chat_template.jinja").write_text(template)
    words = ("generate", model, "--chat", "--prompt", "hello", "--rotations", "none")
    assert "the tokenizer's chat template was stopped" in refused(inside(*words))
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    write_jsonl(inside.folder / "chats.jsonl", [chat])
    words = ("calibrate", model, "--data", "chats.jsonl", "--output", "out")
    assert "the tokenizer's chat template was stopped" in refused(inside(*words))


def test_the_text_of_a_chat_is_that_of_the_tokenizer():
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = ChatTemplate(tokenizer)
    for text in ("hello", "größe 👩 \ud800", "x" * 5_000_000):
        messages = [{"role": "user", "content": text}]
        assert template.render(messages) == tokenizer.apply_chat_template(messages, tokenize=False)
    process = template._process
    assert process.is_alive()
    del template
    process.join(5)
    assert process.exitcode == 0, "it ends with its object"


# ---- recipes


@pytest.mark.hostile("size")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB + "model: *a8\n", "it has aliases"),
        (MERGE, "it has aliases"),
        ("name: " + "x" * 10_000_000, "it has more than 65,536 characters"),
        ("name: " + "x" * 60_000, "name = 'xxx"),
        ("? " + "x" * 60_000 + "\n: 1", "unknown key 'xxx"),
        ("extends: " + "x" * 60_000, "extends an unknown recipe 'xxx"),
        ("a: " + "[" * 60_000, "it is nested too deeply"),
        ("data: {tokens: 1000000000000}", "tokens = 1000000000000"),
        ("data: {length: 1000000000000}", "length = 1000000000000"),
        ("seed: " + "9" * 30, "seed = 999"),
        ("group_size: 1000000000000", "group_size = 1000000000000"),
        ("sink: 1000000000000", "sink = 1000000000000"),
        ("sink: 1" + "0" * 5000, "recipe.yaml"),
    ],
    ids=["aliases", "merges", "10 MB", "name", "key", "extends", "nested", "tokens", "length",
         "seed", "steps", "sink", "long"],
)  # fmt: skip
def test_a_recipe_is_small_and_its_numbers_have_ranges(tmp_path, text, says):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RotationZooError) as error:
        load(str(path))
    assert says in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.hostile("size")
@pytest.mark.parametrize("front", [MERGE, BOMB], ids=["merges", "aliases"])
def test_the_card_of_a_model_is_read_within_limits(tmp_path, front):
    model = save_tiny(tmp_path / "model")
    card = model / "README.md"
    card.write_text("---\nlicense: mit\ntags: [a]\n---\n# A model\n")
    assert license_of(find(str(model))) == "mit"
    card.write_text(f"---\n{front}license: mit\n---\n# A model\n")
    assert license_of(find(str(model))) is None


# ---- numbers


@pytest.mark.hostile("size")
@pytest.mark.parametrize(
    "words",
    [
        ("calibrate", "demo", "--dry-run", "--tokens", 10**12),
        ("calibrate", "demo", "--dry-run", "--length", 10**12),
        ("calibrate", "demo", "--dry-run", "--seed", 10**30),
        ("evaluate", "demo", "--tokens", 10**12),
        ("evaluate", "demo", "--questions", 10**12),
        ("calibrate", "demo", "--recipe", "x" * 9**5),
    ],
    ids=lambda words: " ".join(map(str, words[-2:]))[:24],
)
def test_numbers_and_names_have_ranges(inside, words):
    error = refused(inside(*words))
    assert words[-2].removeprefix("--") in error.splitlines()[0]


# ---- configs


@pytest.mark.hostile("size")
@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 50_000},
        {"num_hidden_layers": 10**12},
        {"model_type": "gpt2", "n_layer": 50_000},
        {"text_config": {"num_hidden_layers": 50_000}},
        {"vision_config": {"depth": 50_000}},
    ],
    ids=["many", "10^12", "another name", "of the text", "of images"],
)
@pytest.mark.parametrize("word", ["plan", "calibrate"])
def test_layers_are_counted_before_anything_is_built(inside, word, changes):
    config = json.loads((find("demo").folder / "config.json").read_text())
    (inside.folder / "model").mkdir()
    (inside.folder / "model" / "config.json").write_text(json.dumps(config | changes))
    assert "layers, more than 1,024" in refused(inside(word, "model"))


@pytest.mark.hostile("size")
def test_layers_that_a_pattern_counts(inside):
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "*" * 50_000}
    (inside.folder / "model").mkdir()
    (inside.folder / "model" / "config.json").write_text(json.dumps(config))
    assert "asks for 50,000 layers" in refused(inside("plan", "model"))


@pytest.mark.hostile("size")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("word", ["plan", "calibrate"])
def test_a_config_has_at_most_16_mib(inside, word, name):
    model = save_tiny(inside.folder / "model")
    (model / name).write_text('{"x": [' + "[]," * (6 << 20) + "[]]}")
    assert f"{name} of model has 18,874,379 bytes" in refused(inside(word, "model"))


# ---- rotation files


@pytest.mark.hostile("size")
@pytest.mark.parametrize("shared", [True, False], ids=["one tensor", "a tensor each"])
def test_a_pair_of_many_layers_is_refused_before_it_is_unpickled(inside, monkeypatch, shared):
    eye = torch.eye(2)
    layers = {n: {"rotation": eye if shared else eye.clone()} for n in range(5000)}
    if shared:
        layers = {n: {"rotation": eye} for n in range(150_000)}
    for name in ("k_rotation.pt", "v_rotation.pt"):
        torch.save({"objective": "qqt_r_h_pbr", "layers": layers}, inside.folder / name)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpickled"))
    error = refused(inside("import", "k_rotation.pt", "v_rotation.pt", "--model", "demo"))
    assert "holds more tensors than any model has layers for" in error


# ---- headers of weights


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def texts(count: int, content: bytes = b"a") -> bytes:
    return struct.pack("<IQ", 8, count) + text(content) * count


def write_gguf(folder: Path, architecture: bytes, *fields: bytes) -> str:
    """A GGUF file that is all header."""
    first = gguf_field(b"general.architecture", 8, text(architecture))
    content = gguf_bytes(fields=1 + len(fields), body=b"".join([first, *fields]))
    (folder / "x.gguf").write_bytes(content + bytes(512))
    return "x.gguf"


@pytest.mark.hostile("size")
@pytest.mark.parametrize("count", [b"block_count", b"nextn_predict_layers"])
@pytest.mark.parametrize("architecture", [b"qwen2", b"qwen3", b"gemma3", b"llama", b"qwen2moe"])
def test_the_blocks_of_a_gguf_are_counted_first(inside, architecture, count):
    number = gguf_field(architecture + b"." + count, 4, struct.pack("<I", 2**32 - 1))
    model = write_gguf(inside.folder, architecture, number)
    assert "asks for 4,294,967,295 layers" in refused(inside("plan", model))


TOKENS = b"tokenizer.ggml.tokens"
LARGE = {
    "a template": gguf_field(b"tokenizer.chat_template", 8, text(b"{{ x }}" * 3_000_000)),
    "a name": gguf_field(b"general.name", 8, text(b"x" * 2_000_000)),
    "a token": gguf_field(TOKENS, 9, texts(1, b"x" * 50_000_000)),
    "tokens": gguf_field(TOKENS, 9, texts(2_000_000)),
    "long tokens": gguf_field(TOKENS, 9, texts(100_000, b"x" * 400)),
}


@pytest.mark.hostile("size")
@pytest.mark.parametrize("name", LARGE)
def test_the_texts_of_a_gguf_are_counted_first(inside, name):
    model = write_gguf(inside.folder, b"llama", LARGE[name])
    error = refused(inside("plan", model))
    assert "it has a text above 1,048,576 bytes" in error or "it has lists of lists, or" in error


@pytest.mark.hostile("size")
def test_a_header_of_safetensors_has_a_limit(tmp_path):
    model = save_tiny(tmp_path / "model")
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 33))
        file.truncate(1 << 34)  # sparse: it takes no room
    with pytest.raises(RotationZooError, match=r"its header is longer than the file, or than 100"):
        weights_fingerprint(find(str(model)))


@pytest.mark.hostile("link")
@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
     "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "README.md"],
)  # fmt: skip
def test_a_pipe_among_the_files_of_a_model_is_not_waited_for(inside, name):
    model = save_tiny(inside.folder / "model")
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    inside("calibrate", "model", "--dry-run", "--data", "bundled")
    assert weights_fingerprint(find(str(model)))
    if name in ("README.md", "generation_config.json"):
        succeeded(inside("calibrate", "model", "--recipe", "hadamard"))


# ---- manifests


@pytest.mark.hostile("size")
@pytest.mark.parametrize("key", ["id", "license", "architecture"])
def test_no_name_in_a_manifest_fills_a_page(inside, made, key):
    folder = Path(shutil.copytree(made, inside.folder / "out"))
    with edited_manifest(folder) as content:
        content["model"][key] = "x" * 1_000_000
    error = refused(inside("report", folder))
    assert f"model.{key}: String should have at most 16384 characters" in error
