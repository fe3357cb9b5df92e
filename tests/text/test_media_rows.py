"""Rows with images and audio, from a processor."""

import math

import numpy as np
import pytest
import torch
from support import media
from support.models import write_jsonl
from tokenizers.processors import TemplateProcessing

from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import Data
from rotationzoo.text.rows import _read_audio, read_media_corpus

pytestmark = media.needs_pillow


@pytest.fixture(scope="module")
def gemma3():
    return media.build("gemma3")


@pytest.fixture
def rows(tmp_path):
    return media.write_rows(tmp_path)


def read(family, path, **options):
    model, processor = family
    data = Data(**{"source": str(path), "images": "image", "tokens": 4096, **options})
    return read_media_corpus(data, processor, model.config)


def write(folder, *records):
    return write_jsonl(folder / "rows.jsonl", records)


def chat(*parts, role="user"):
    return {"role": role, "content": list(parts)}


IMAGE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def decoded(family, row):
    return family[1].tokenizer.decode(row.ids[0])


def test_an_image_stands_before_its_text(gemma3, rows):
    corpus = read(gemma3, rows)
    assert len(corpus.media) == 4
    for row, ids in zip(corpus.media, corpus.rows, strict=True):
        assert decoded(gemma3, row).startswith(f"\n\n<image>{'<pixel>' * 4}</image>\n\n")
        assert row.is_media.sum() == 4
        assert row.inputs["pixel_values"].shape == (1, 3, 28, 28)
        assert torch.equal(row.ids[0], ids)


def test_parts_of_a_chat_say_where_images_stand(gemma3, rows, tmp_path):
    messages = [chat(text("see "), IMAGE, text(" and "), IMAGE | {"url": "http://elsewhere"})]
    path = write(tmp_path, {"messages": messages, "image": ["0.png", "1.png"]})
    (row,) = read(gemma3, path).media
    assert row.is_media.sum() == 8
    assert decoded(gemma3, row).startswith("see \n\n<image>")


MISPLACED = {
    "has 0 parts of type image, and its row has 1 to put there": [text("no place for it")],
    "has 2 parts of type image, and its row has 1 to put there": [IMAGE, IMAGE],
    "has 1 part of type audio, and its row has 0 to put there": [IMAGE, {"type": "audio"}],
    "holds <pixel>, which stands for media of the model": [IMAGE, text("a <pixel> in the text")],
}


@pytest.mark.parametrize("sentence", MISPLACED)
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_media_without_a_place_and_places_without_media_are_refused(sentence, name, rows, tmp_path):
    """Processors of some versions would write tokens without features."""
    path = write(tmp_path, {"messages": [chat(*MISPLACED[sentence])], "image": "0.png"})
    with pytest.raises(RotationZooError, match=sentence):
        read(media.build(name), path)


@pytest.mark.parametrize("adds", [True, False])
def test_a_row_has_the_start_tokens_once(adds, rows, monkeypatch):
    """Whether or not the processor adds them by default: that of LFM2-VL does not."""
    family = media.build("gemma3")
    end = family[1].tokenizer.convert_tokens_to_ids("<|end|>")
    family[1].tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end)]
    )
    family[1].chat_template = "<|end|>" + family[1].chat_template
    kind = type(family[1])
    process = kind.__call__

    def call(*words, **options):
        return process(*words, **{"add_special_tokens": adds, **options})

    monkeypatch.setattr(kind, "__call__", call)
    for row in read(family, rows).media:
        assert row.ids[0, 0] == end
        assert (row.ids[0] == end).sum() == 1


def test_data_sets_hold_bytes_or_images(gemma3, rows, tmp_path):
    import datasets

    names = ["0.png", "1.png"]
    columns = {"text": ["a caption " * 9] * 2, "image": [str(tmp_path / name) for name in names]}
    text = datasets.Value("string")
    features = datasets.Features(text=text, image=datasets.Image())
    plain = datasets.Features(text=text, image={"bytes": datasets.Value("binary"), "path": text})
    datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / "images.parquet")
    columns["image"] = [{"bytes": (tmp_path / each).read_bytes(), "path": None} for each in names]
    datasets.Dataset.from_dict(columns, plain).to_parquet(tmp_path / "bytes.parquet")
    columns = [{"text": "a caption " * 9, "image": name} for name in names]
    files = tmp_path / "images.parquet", tmp_path / "bytes.parquet", write(tmp_path, *columns)
    assert len({read(gemma3, file).fingerprint for file in files}) == 1, "the same pixels"


def test_rows_are_cut_behind_their_images(gemma3, tmp_path, rows):
    assert [len(row) for row in read(gemma3, rows, length=20).rows] == [20] * 4
    corpus = read(gemma3, rows, length=20, tokens=30)
    assert [len(row) for row in corpus.rows] == [20, 20]
    assert corpus.media[1].inputs["token_type_ids"].shape == (1, 20)
    late = {"messages": [chat(text("some words " * 20), IMAGE)], "image": "0.png"}
    early = {"messages": [chat(IMAGE, text("some words " * 20))], "image": "0.png"}
    corpus = read(gemma3, write(tmp_path, late, early), length=20)
    assert len(corpus.rows) == 1
    assert "1 document with longer images or audio left out" in corpus.note
    with pytest.raises(RotationZooError, match="no row whose images and audio fit 20 tokens"):
        read(gemma3, write(tmp_path, late), length=20)


def test_audio_is_resampled_to_the_rate_of_the_model(tmp_path):
    seconds = np.arange(8000) / 8000
    sine = np.sin(2 * math.pi * 200 * seconds)
    media.write_wave(tmp_path / "sine.wav", 16384 * sine)
    data = Data(source=str(tmp_path / "rows.jsonl"), audio="sound")
    samples = _read_audio("sine.wav", 16000, data)
    assert samples.dtype == np.float32
    expected = 0.5 * np.sin(2 * math.pi * 200 * np.arange(16000) / 16000)
    assert np.abs(samples - expected)[200:-200].max() < 1e-3
    held = {"bytes": (tmp_path / "sine.wav").read_bytes(), "path": "elsewhere.wav"}
    assert np.array_equal(_read_audio(held, 16000, data), samples)


def test_images_and_audio_of_one_row(tmp_path):
    family = media.build("gemma4")
    path = media.write_rows(tmp_path, rows=1, audio=True)
    (row,) = read(family, path, audio="sound").media
    heard = (row.ids[0] == family[0].config.audio_token_id).sum()
    seen = (row.ids[0] == family[0].config.image_token_id).sum()
    assert heard > 5
    assert seen > 5
    assert row.is_media.sum() == heard + seen


BROKEN = {
    "No such file or directory: '.*missing.png'": "missing.png",
    "cannot identify image file": "rows.jsonl",
    "cannot be prepared for the model: unsupported operand": 3,
    "has no column pixels": {"images": "pixels"},
    "has no column image": None,
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_broken_images_are_refused(sentence, gemma3, tmp_path):
    broken = BROKEN[sentence]
    record = {"text": "words", "image": broken if isinstance(broken, str | int) else "0.png"}
    if broken is None:
        record.pop("image")
    options = broken if isinstance(broken, dict) else {}
    with pytest.raises(RotationZooError, match=sentence):
        read(gemma3, write(tmp_path, record), **options)


@pytest.mark.hostile("size")
def test_a_decompression_bomb_is_refused(gemma3, tmp_path):
    """A small file with 14,000 x 14,000 pixels."""
    from PIL import Image

    Image.new("1", (14_000, 14_000)).save(tmp_path / "bomb.png")
    with pytest.raises(RotationZooError, match="decompression bomb"):
        read(gemma3, write(tmp_path, {"text": "words", "image": "bomb.png"}))


def test_a_model_without_a_chat_template_is_refused(gemma3, rows, monkeypatch):
    monkeypatch.setattr(gemma3[1], "chat_template", None)
    with pytest.raises(RotationZooError, match="does not have a chat template"):
        read(gemma3, rows)
