"""The start tokens of rows and prompts, from the tokenizer or, where it adds none, from its chat
template; and the loss that tells of missing ones."""

import json

import pytest
from support.jobs import job
from support.models import (
    demo_tokenizer,
    edit_config,
    edited_weights,
    save_tiny,
    small,
    tokenizer_that_starts_with,
)
from support.recipes import QUICK

from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.recipe import Data
from rotationzoo.text.rows import read_corpus, start_tokens

TURN = "<turn>{{ m.role }}\n{{ m.content }}\n"
BOS_OF_USERS = "{{ bos_token if m.role == 'user' }}{{ m.content }}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
TEMPLATES = {
    "Gemma": (NO_SYSTEM + "{{ bos_token }}", TURN, ["<bos>"]),
    "DeepSeek": ("{{ bos_token }}", "{{ m.role }} {{ m.content }}", ["<bos>"]),
    "Llama 2": ("", BOS_OF_USERS, []),
    "Llama 2 without system": (NO_SYSTEM, BOS_OF_USERS, ["<bos>"]),
    "GLM": ("[mask]<sop>", TURN, ["[mask]", "<sop>"]),
    "ChatML": ("", TURN, []),
    "a default system prompt": ("<sop>system\nBe kind.\n", TURN, []),
    "refuses all": ("{{ raise_exception('no') }}", TURN, []),
    "SmolLM2, whose bos opens every turn": ("", TURN, [], "<turn>"),
}


def chatty(before, turn, bos="<bos>"):
    tokenizer = demo_tokenizer()
    tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.add_tokens(["<turn>", "[mask]", "<sop>"], special_tokens=True)
    tokenizer.chat_template = f"{before}{{% for m in messages %}}{turn}{{% endfor %}}"
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_start_tokens_are_those_that_the_template_writes_once(name):
    before, turn, expected, *bos = TEMPLATES[name]
    tokenizer = chatty(before, turn, *bos)
    assert tokenizer.convert_ids_to_tokens(start_tokens(tokenizer)) == expected


def test_what_the_tokenizer_adds_itself_comes_first(jsonl):
    own = tokenizer_that_starts_with("<|end|> $A", ("<|end|>", 0))
    own.chat_template = "!{% for m in messages %}{{ m.content }}{% endfor %}"
    assert start_tokens(own) == [0]
    assert read_corpus(small(jsonl), own).note is None


@pytest.fixture(scope="module")
def gemma_like(tmp_path_factory):
    """A model whose tokenizer adds no start token, and whose template writes one."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "like-gemma")
    edit_config(folder, "tokenizer_config.json", bos_token="<|end|>")
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


SAYS = "exts start with <|end|>, which only the chat template writes"


def test_every_command_notes_the_start_tokens(gemma_like, inside):
    words = "--tokens", "1024", "--length", "512"
    made = inside("calibrate", gemma_like, *words, "--output", "out")
    assert SAYS in made.stderr
    manifest = json.loads((inside.folder / "out" / "manifest.json").read_text())
    assert SAYS in manifest["calibration"]["note"]
    options = "--tasks", "none", "--windows", "64/64"
    judged = inside("evaluate", gemma_like, "out", *words, *options, "--json")
    assert any(SAYS in note for note in json.loads(judged.stdout)["notes"])
    prompt = "--prompt", "import os", "--max-new-tokens", "4", "--rotations", "none"
    assert SAYS in inside("generate", gemma_like, *prompt).stderr
    assert SAYS not in inside("generate", gemma_like, *prompt, "--chat").stderr


def test_a_loss_beyond_chance_is_a_warning(tmp_path, inside):
    recipe = QUICK.model_copy(update={"data": Data(tokens=512, length=128)})
    says = "predicts this text worse than chance"
    noted = calibrate(job("demo", tmp_path / "demo", recipe)).manifest.notes
    assert not any(says in note for note in noted)
    model = save_tiny(tmp_path / "model")
    with edited_weights(model) as weights:
        weights["model.norm.weight"] *= 20
    artifact = calibrate(job(model, tmp_path / "out", recipe))
    assert any(says in note for note in artifact.manifest.notes)
    words = "--tokens", "256", "--length", "256", "--tasks", "none", "--windows", "64/64"
    judged = inside("evaluate", model, *words, "--json")
    assert any(says in note for note in json.loads(judged.stdout)["notes"])
