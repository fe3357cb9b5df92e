"""Text that is written token by token: as it is in one piece, and never half a character."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rotationzoo.model.source import DEMO
from rotationzoo.runtime.text_stream import TextStream

TEXT = "def größe(x):\n    return '你好 👩‍👧' # naïve \N{ZERO WIDTH JOINER}end\n  x"


def words_with_spaces() -> PreTrainedTokenizerFast:
    """A tokenizer that decodes the space before a word only after another word, as SentencePiece's
    do."""
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
    writer.start()
    writer.put(torch.tensor([prompt]))
    for token in ids:
        writer.put(torch.tensor([token]))
    writer.end()
    assert writer.text == "".join(pieces)
    assert writer.ids == ids
    assert len(writer.times) == 1 + len(ids)
    return pieces


def test_no_character_is_cut_and_no_token_is_kept_back():
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer(TEXT).input_ids
    pieces = stream(tokenizer, tokenizer("import os\n").input_ids, ids)
    assert "".join(pieces) == TEXT
    assert not [piece for piece in pieces if "\ufffd" in piece]
    assert len(pieces) < len(ids), "some tokens hold a part of a character"
    assert pieces[0] == tokenizer.decode(ids[0]), "written before the word ends"


def test_half_a_character_at_the_end_is_written_at_last():
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    whole = tokenizer("a👩").input_ids
    assert stream(tokenizer, [5], whole[:-1])[-1].endswith("\ufffd")


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3, 4]])
def test_spaces_before_words_stay_at_the_start_of_the_text_and_of_lines(prompt):
    """transformers' own streamer loses those of a line's beginning."""
    ids = [2, 3, 4, 5, 6]
    assert "".join(stream(words_with_spaces(), prompt, ids)) == " x:\n    return y"
