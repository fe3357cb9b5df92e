"""`rotationzoo generate`: where the prompt comes from, what is printed where, and how it ends."""

import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from support.command_line import only_error, succeeded, without_stages
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotationzoo import RotatedCache
from rotationzoo.cli.output import write_text
from rotationzoo.model.source import DEMO

PROMPT = "import os\nimport sys\n\n\nclass Reader:\n    def read(self):"
SMALL = ["--sink", "2", "--recent", "8", "--max-new-tokens", "24"]
SUMMARY = re.compile(
    r"\d+ tokens at [\d,.]+ a second; prompt of [\d,]+ at [\d,]+ a second; "
    r"cache [1-9][\d.]* [KM]B, and [1-9][\d.]* [KM]B in bf16( \(\d+\.\d times smaller\))?"
    r"(; a context this short stays exact)?(; no rotation)?"
)


@pytest.fixture(scope="module")
def expected(made) -> str:
    """What the library alone writes with the same cache."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    cache = RotatedCache(made, model, sink=2, recent=8)
    ids = model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=24)[0]
    return tokenizer.decode(ids[inputs["input_ids"].shape[1] :])


def test_a_piped_prompt_and_the_text_alone_on_stdout(command, made, expected):
    words = ["generate", "demo", "--rotations", made, *SMALL]
    shown = succeeded(command(*words, input=PROMPT + "\n"))
    assert shown.stdout == expected + "\n"
    summary, following = without_stages(shown.stderr)
    assert SUMMARY.fullmatch(summary)
    assert following == f"Next: rotationzoo evaluate demo {made} --save"


def test_without_a_prompt_only_the_demo_has_one(inside, made, tiny):
    options = ["--format", "sglang", "--compare"]
    shown = inside("generate", "demo", "--rotations", made, *options)
    line = re.search(r"The demo completes a line that its prompt has: (.*)\.\n", shown.stderr)[1]
    answer = "marble pepper silver maple lemon river"
    assert line == "# saddle orchid"
    assert answer in shown.stdout, "the exact model can answer"
    assert "there is no prompt" in only_error(inside("generate", tiny, "--rotations", "none"), 2)


def test_json_is_one_object_with_these_keys(inside, made, expected, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    words = ["generate", "demo", "--rotations", made, "--file", file, *SMALL, "--json"]
    shown = inside(*words, "--compare")
    report = json.loads(shown.stdout)
    assert report["text"] == expected
    keys = "tokens tokens_per_second cache_bytes bf16_cache_bytes prompt_tokens prompt_seconds"
    assert all(report[key] > 0 for key in keys.split())
    assert (report["stop"], report["format"]) == ("length", "sglang")
    assert report["rotations"] == str(made)
    assert without_stages(shown.stderr) == []
    quiet = inside(*words[:-1], "--quiet")
    assert (quiet.stdout, quiet.stderr) == (expected + "\n", "")
    words[words.index(made)] = "none"
    report = json.loads(inside(*words, "--compare").stdout)
    parted = report["parted_at"]
    assert parted is not None, "the prompt leaves the small windows, so that the cache is read"
    start = parted["character"]
    assert report["text"][:start] == report["exact_text"][:start]
    assert report["text"][start] != report["exact_text"][start]
    assert "makes two" in only_error(inside(*words[:-1], "--quiet", "--compare"), 2)


def test_the_exact_model_is_shown_after_the_text(inside, made):
    words = ["generate", "demo", "--prompt", PROMPT, "--compare"]
    shown = inside(*words, "--rotations", "none", *SMALL)
    text, exact = shown.stdout.split("\n\nThe exact model writes:\n")
    assert text.strip()
    assert re.search(
        r'\n\nThe two diverge after [\d]+ characters? \(\d+ tokens?\): here ".+", exact ".+"\.$',
        exact.rstrip(),
    )
    assert shown.stderr.endswith("; no rotation\nNext: rotationzoo calibrate demo\n")
    assert "stays exact" not in shown.stderr
    shown = inside(*words, "--rotations", made, "--max-new-tokens", "2")
    assert "; a context this short stays exact" in shown.stderr
    assert shown.stdout.endswith("\nThe exact model writes the same 2 tokens.\n")


def test_a_terminal_gets_no_control_characters(terminal):
    screen = terminal(80)
    write_text("größe\t👩‍👧\x1b[2J\u202e\n")
    assert screen.getvalue() == "größe\t👩‍👧\\x1b[2J\\u202e\n"


def test_the_newest_artifact_of_the_model_is_taken(inside, made, artifact):
    words = ["generate", "demo", "--prompt", PROMPT, *SMALL]
    error = only_error(inside(*words), 2)
    assert "there are no rotations of demo in the folder rotations" in error
    assert error.endswith("Hint: make some with: rotationzoo calibrate demo\n")
    folder = inside.folder / "rotations"
    for name, source in (("old", made), ("new", made), ("of-another-model", artifact)):
        shutil.copytree(source, folder / name)
    os.utime(folder / "old" / "rotations.safetensors", (1, 1))
    (folder / "damaged").mkdir()
    (folder / "damaged" / "manifest.json").write_text("{")
    first, *_ = without_stages(inside(*words).stderr)
    assert first == "Rotations: rotations/new, the newest of 2"


NO_PROMPTS = {
    b" \n": "is empty",
    b"\x7fELF\0\0": "is not text: it has zero bytes",
    "naïve".encode("latin1"): "is not UTF-8: byte 2 is wrong",
}


@pytest.mark.parametrize(("content", "says"), NO_PROMPTS.items())
def test_what_is_no_prompt(inside, content, says, monkeypatch):
    (inside.folder / "prompt").write_bytes(content)
    words = ["generate", "demo", "--rotations", "none"]
    assert f"Error: prompt {says}" in only_error(inside(*words, "--file", "prompt"), 2)
    with (inside.folder / "prompt").open() as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        assert f"Error: standard input {says}" in only_error(inside(*words), 2)


def test_one_line_end_of_a_file_is_left_out(inside, monkeypatch):
    prompts = []
    monkeypatch.setattr(
        "rotationzoo.generation.generate.generate",
        lambda job, *_: prompts.append(job.prompt) or 1 / 0,
    )
    for content in (b"a", b"a\n", b"a\r\n", b"a\n\n", "\ufeffa".encode()):
        (inside.folder / "prompt").write_bytes(content)
        inside("generate", "demo", "--rotations", "none", "--file", "prompt")
    assert prompts == ["a", "a", "a", "a\n", "a"]


@pytest.fixture
def ctrl_c(monkeypatch, interruptible):
    """Ctrl-C after ten pieces of text."""
    pieces = []

    def press(text: str) -> None:
        write_text(text)
        pieces.append(text)
        if len(pieces) == 10:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("rotationzoo.cli.progress_bar.write_text", press)
    return pieces


def test_ctrl_c_keeps_the_text_and_tells_what_it_took(inside, made, expected, ctrl_c):
    shown = inside("generate", "demo", "--rotations", made, "--prompt", PROMPT, *SMALL)
    assert shown.returncode == 130, shown.stderr
    text = "".join(ctrl_c[:10])
    assert expected.startswith(text)
    assert shown.stdout == text + "\n"
    summary, error, hint = without_stages(shown.stderr)
    assert SUMMARY.fullmatch(summary)
    tokens = summary.split(" ", 1)[0]
    assert error == f"Error: interrupted after {tokens} tokens"
    assert hint.startswith("Hint: run it again with: rotationzoo generate demo --rotations")
