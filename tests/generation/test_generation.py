"""A text that a model writes through a 2-bit cache, token by token."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.models import edit_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rotationzoo import RotatedCache, generate
from rotationzoo.errors import RotationZooError
from rotationzoo.generation.generate import TextStream, find_parting
from rotationzoo.generation.generate import generate as run
from rotationzoo.model import loading
from rotationzoo.model.source import DEMO
from rotationzoo.settings import GenerationSettings

TEXT = "import os\nimport sys\n\n\nclass Reader:\n    def read(self, path):\n" * 4
SMALL = {"device": "cpu", "sink": 4, "recent": 16, "max_new_tokens": 16}


@pytest.fixture
def write(demo, tokenizer) -> Callable[..., str]:
    """Writes what the library alone does, with the cache that it is given."""

    def run(cache=None, text=TEXT, **options) -> str:
        inputs = tokenizer(text, return_tensors="pt")
        settings = {"do_sample": False, "max_new_tokens": SMALL["max_new_tokens"], **options}
        ids = demo.generate(**inputs, past_key_values=cache, **settings)[0]
        return tokenizer.decode(ids[inputs["input_ids"].shape[1] :])

    return run


@pytest.mark.parametrize("chunk", [pytest.param(2048, marks=pytest.mark.thorough), 24])
def test_the_text_is_that_of_the_cache_and_its_bytes_are_too(demo, tokenizer, made, write, chunk):
    report = generate("demo", TEXT, rotations=str(made), prefill_chunk=chunk, compare=True, **SMALL)
    chunks = {"prefill_chunk_size": chunk} if chunk == 24 else {}
    cache = RotatedCache(made, demo, sink=4, recent=16)
    assert report["text"] == write(cache, **chunks)
    assert report["exact_text"] == write()
    assert (report["tokens"], report["stop"]) == (16, "length")
    assert report["cache_bytes"] == cache.bytes_held
    assert report["bf16_cache_bytes"] == cache.bytes_in_bf16
    assert report["tokens_per_second"] > 0
    assert report["prompt_tokens"] == len(tokenizer(TEXT).input_ids)


def test_a_cache_that_stores_everything_exact_writes_what_the_exact_model_writes():
    options = SMALL | {"recent": 4096}
    report = generate("demo", TEXT, rotations=None, compare=True, **options)
    assert report["exact_text"] == report["text"]
    assert report["parted_at"] is None


def test_where_two_texts_part():
    def text(words: str, stop: str = "length") -> SimpleNamespace:
        tokens = words.split("|")
        return SimpleNamespace(text="".join(tokens), ids=tokens, stop=stop)

    assert find_parting(text("a|b|c"), text("a|b|c")) is None
    assert find_parting(text("a|bc|d"), text("a|bx|d")) == {"character": 2, "token": 1}
    assert find_parting(text("a|b", "end"), text("a|b|c")) == {"character": 2, "token": 2}
    assert find_parting(text("a|b", "interrupted"), text("a|b|c")) is None
    assert find_parting(text("a|b|c"), text("a|b", "interrupted")) is None


def test_a_reader_may_leave(made):
    def leave(_: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        generate("demo", TEXT, rotations=str(made), write=leave, **SMALL)


def test_a_chat_ends_where_the_answer_begins(made, write, tmp_path):
    folder = Path(shutil.copytree(DEMO, tmp_path / "chat"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}<answer>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    exact = SMALL | {"recent": 64}
    report = generate(str(folder), "hello", rotations=str(made), chat=True, **exact)
    assert report["text"] == write(text="<user>hello\n<answer>")


def test_a_model_ends_its_text_itself(made, tmp_path):
    folder = Path(shutil.copytree(DEMO, tmp_path / "short"))
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {list(range(2048))}}}')
    report = generate(str(folder), TEXT, rotations=str(made), **SMALL)
    assert (report["stop"], report["tokens"]) == ("end", 1)
    assert report["tokens_per_second"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt": [1, 2]}, "a prompt is a text, and not of type list"),
        ({"max_new_tokens": 8192}, "exceed the 8,192 positions of demo"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1"),
        ({"chat": True}, "no chat template"),
        ({"format": "int3"}, "no format 'int3'"),
        ({"group_size": 48}, r"do not divide heads of 64 channels, but groups of 4, 8, 16, 32, 64"),
        ({"revision": "main"}, "demo is a model on this machine, which has no revision 'main'"),
        ({"format": "segments", "rotations": None}, "segments needs rotations with transform"),
        ({"rotations": "rotations/missing"}, "not an artifact"),
        ({"rotations": "Qwen/Qwen3-8B"}, "not an artifact"),
        ({"max_memory": "cpu=1GiB"}, "needs a device map"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_found_before_the_weights_are_read(options, words, monkeypatch, made):
    monkeypatch.setattr(loading, "load", None)
    with pytest.raises(RotationZooError, match=words) as raised:
        generate(**{"model": "demo", "prompt": TEXT, "rotations": str(made), **options})
    assert raised.value.hint


def test_a_note_on_other_weights_comes_before_the_text(made, tmp_path):
    shown, folder = [], Path(shutil.copytree(DEMO, tmp_path / "other"))
    edit_config(folder, rope_theta=12345.0)
    options = {"max_new_tokens": 4, "sink": 4, "recent": 8}
    job = GenerationSettings(str(folder), TEXT, rotations=str(made), **options)
    with pytest.raises(RotationZooError, match="made for other weights"):
        run(job)
    job = replace(job, anyway=True)
    report = run(job, write=lambda text: shown.append("text"), note=shown.append)
    assert report["notes"] == shown[:1]
    assert f"was made for other weights than {folder} has" in shown[0]
    assert set(shown[1:]) == {"text"}


def test_a_full_device(monkeypatch, made):
    def fail(*args, **options):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM.forward", fail)
    with pytest.raises(RotationZooError, match="do not fit the device's memory") as raised:
        generate("demo", TEXT, rotations=str(made), **SMALL)
    assert "--prefill-chunk 512" in str(raised.value.hint)


CHARACTERS = "def größe(x):\n    return '你好 👩‍👧' # naïve \N{ZERO WIDTH JOINER}end\n  x"


def words_with_spaces() -> PreTrainedTokenizerFast:
    """Like SentencePiece's: it decodes the space before a word only after another word."""
    words = ["▁if", "▁x", ":", "\n", "▁▁▁▁return", "▁y"]
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def stream(tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    """The pieces of text that a stream writes."""
    pieces: list[str] = []
    writer = TextStream(tokenizer, torch.tensor(prompt), pieces.append)
    writer.put(torch.tensor([prompt]))
    for token in ids:
        writer.put(torch.tensor([token]))
    writer.end()
    assert writer.text == "".join(pieces)
    assert writer.ids == ids
    assert len(writer.times) == 1 + len(ids)
    return pieces


def test_no_character_is_cut_and_no_token_is_kept_back(tokenizer):
    ids = tokenizer(CHARACTERS).input_ids
    pieces = stream(tokenizer, tokenizer("import os\n").input_ids, ids)
    assert "".join(pieces) == CHARACTERS
    assert not [piece for piece in pieces if "\ufffd" in piece]
    assert len(pieces) < len(ids), "some tokens hold a part of a character"
    assert pieces[0] == tokenizer.decode(ids[0]), "written before the word ends"


def test_half_a_character_at_the_end_is_written_at_last(tokenizer):
    whole = tokenizer("a👩").input_ids
    assert stream(tokenizer, [5], whole[:-1])[-1].endswith("\ufffd")


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3, 4]])
def test_spaces_before_words_stay_at_the_start_of_the_text_and_of_lines(prompt):
    ids = [2, 3, 4, 5, 6]
    assert "".join(stream(words_with_spaces(), prompt, ids)) == " x:\n    return y"
