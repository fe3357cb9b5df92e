"""Text that a model writes itself."""

import json

import pytest
import torch
import transformers
from support import architectures
from support.architectures import CALIBRATED, families
from support.models import DATA, save_tiny

from rotationzoo.calibration import generate
from rotationzoo.calibration.generate import (
    WritingSettings,
    find_end_tokens,
    read_sampling,
    write_texts,
)
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.model.source import find

GREEDY = {"temperature": 1e-4, "top_k": 0, "top_p": 1.0}
BARE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15])]


@pytest.fixture(scope="module")
def model(tiny):
    return loading.load(find(str(tiny)), loading.load_config(find(str(tiny))), "cpu", torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DATA / "model")


def write(model, prompts, tokens=1000, **changes):
    """Texts of at most 20 tokens each, of three prompts at a time; greedy unless `changes` say
    otherwise."""
    options = {"length": 20, "batch": 3, "sampling": GREEDY, "end_tokens": [0]} | changes
    return write_texts(model, prompts, WritingSettings(tokens=tokens, **options))


@families(CALIBRATED)
def test_every_token_is_the_models_own_choice(name):
    """Of prompts of unequal lengths, continued together: what a pass over the whole text would
    choose next."""
    model = architectures.build(name)
    # Its decoding with a cache is wrong in this version.
    if name == "doge" and transformers.__version__.startswith("5.17"):
        with pytest.raises(RotationZooError, match="token by token"):
            write(model, PROMPTS)
        return
    texts = write(model, PROMPTS)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert torch.equal(text[: len(prompt)], prompt)
        chosen = model(input_ids=text[None]).logits[0].argmax(-1)
        assert torch.equal(text[len(prompt) :], chosen[len(prompt) - 1 : -1])
        assert text[-1] == 0 or len(text) >= 14 + len(prompt)


def test_padding_that_a_model_does_not_bear_is_noticed(model, monkeypatch):
    assert generate._usable_batch(model, PROMPTS[1], 4) == 4
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda attention_mask=None, **options: plain(**options))
    assert generate._usable_batch(model, PROMPTS[1], 4) == 1


def test_a_cache_that_changes_what_is_written_is_noticed(model, monkeypatch):
    """As in some versions of transformers for some families."""
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda past_key_values=None, **options: plain(**options))
    with pytest.raises(
        RotationZooError, match="makes other text of this model token by token than in one pass"
    ):
        generate._usable_batch(model, PROMPTS[1], 4)


def test_it_stops_where_the_model_ends(model):
    plain = write(model, PROMPTS)
    end = int(plain[1][12])
    stopped = write(model, PROMPTS, end_tokens=[end, 0])
    for prompt, before, text in zip(PROMPTS, plain, stopped, strict=True):
        new = before[len(prompt) :].tolist()
        last = new.index(end) + 1 if end in new else len(new)
        assert text.tolist() == [*prompt.tolist(), *new[:last]]


def test_end_tokens_are_looked_for_where_makers_put_them(tiny, tokenizer):
    model = loading.load(
        find(str(tiny)), loading.load_config(find(str(tiny))), "cpu", torch.float32
    )
    model.generation_config.eos_token_id = [5, 6]
    assert find_end_tokens(model, tokenizer) == [5, 6]
    model.generation_config.eos_token_id = None
    assert find_end_tokens(model, tokenizer) == [0] == [model.config.eos_token_id]
    model.config.eos_token_id = None
    assert find_end_tokens(model, tokenizer) == [tokenizer.eos_token_id]


def test_it_draws_from_the_models_predictions(model):
    """Of 2,000 first tokens, as many are of the 400 likeliest as the model says, within five
    standard errors."""
    prompt = torch.tensor([5, 6, 7])
    texts = write(model, [prompt] * 2000, 8000, length=4, batch=2000, sampling=BARE)
    drawn = torch.stack([text[3] for text in texts])
    expected = model(input_ids=prompt[None]).logits[0, -1].softmax(-1)
    likely = expected.topk(400).indices
    share = expected[likely].sum().item()
    drawn_share = torch.isin(drawn, likely).double().mean().item()
    assert share > 0.5, "nothing to tell from a uniform draw, which is 0.2"
    assert abs(drawn_share - share) < 5 * (share * (1 - share) / 2000) ** 0.5


def test_a_seed_gives_the_same_text_and_leaves_the_users_own_draws_alone(model):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    first, again, other = (
        write(model, PROMPTS, batch=2, sampling=BARE, seed=seed) for seed in (0, 0, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_more_is_written_than_asked_for(model):
    assert len(write(model, PROMPTS, 1, batch=1, sampling=BARE)) == 1
    assert len(write(model, PROMPTS, 30, batch=1)) == 2
    assert len(write(model, PROMPTS, 30, batch=1, start_tokens=6)) == 3, (
        "what rows begin with anyway does not count"
    )


def test_settings_of_the_makers_that_would_be_in_the_way(model, monkeypatch):
    plain = write(model, PROMPTS)
    odd = {
        "return_dict_in_generate": True,
        "num_beams": 2,
        "max_time": 1e-9,
        "stop_strings": ["a"],
        "max_length": 5,
    }
    for name, value in odd.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert all(torch.equal(a, b) for a, b in zip(plain, write(model, PROMPTS), strict=True))


def test_predictions_that_are_not_finite(tiny):
    model = loading.load(
        find(str(tiny)), loading.load_config(find(str(tiny))), "cpu", torch.float32
    )
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(RotationZooError, match="predictions are not finite"):
        write(model, PROMPTS)


def test_the_makers_settings_are_used(tmp_path):
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    assert read_sampling(find(str(folder))) == BARE
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    )
    assert read_sampling(find(str(folder))) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
