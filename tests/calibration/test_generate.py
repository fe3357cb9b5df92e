"""Text that a model writes itself, and calibration on it."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import architectures
from support.models import DATA, save_tiny

from rotationzoo.calibration import generate
from rotationzoo.calibration import job as jobs
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.errors import RotationZooError
from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.recipe import PRESETS, Data, Recipe
from rotationzoo.text.documents import BUNDLED
from rotationzoo.text.prompts import read_prompts
from rotationzoo.text.rows import pack_texts

GREEDY = {"temperature": 1e-4, "top_k": 0, "top_p": 1.0}
BARE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15])]
SELF = Data(source="self", tokens=1024, length=128, prompt_tokens=16)


@pytest.fixture(scope="module")
def model(tiny):
    return loading.load(find(str(tiny)), loading.load_config(find(str(tiny))), "cpu", torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DATA / "model")


@pytest.fixture
def chats(tmp_path):
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "third"},
        {"role": "assistant", "content": "fourth"},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turns[: 1 + i % 4]}) + "\n" for i in range(8)))
    return path


def write(model, prompts, length, tokens, batch, sampled=GREEDY, **changes):
    return generate.write(model, prompts, length, tokens, batch, sampled, [0], **changes)


def job(model, folder, data=SELF, **changes) -> Job:
    return Job(
        model=str(model),
        recipe=Recipe(data=data),
        output=folder / "out",
        device="cpu",
        batch=2,
        **changes,
    )


FAMILIES = [name for name in architectures.NAMES if architectures.EXPECTED[name].refusal is None]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_is_the_models_own_choice(name):
    """Of prompts of unequal lengths, continued together: what a pass over the whole text would
    choose next."""
    model = architectures.build(name)
    if name == "doge" and transformers.__version__.startswith(
        "5.17"
    ):  # whose decoding with a cache is wrong there
        with pytest.raises(RotationZooError, match="token by token"):
            write(model, PROMPTS, 20, 1000, 3)
        return
    texts = write(model, PROMPTS, 20, 1000, 3)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert torch.equal(text[: len(prompt)], prompt)
        chosen = model(input_ids=text[None]).logits[0].argmax(-1)
        assert torch.equal(text[len(prompt) :], chosen[len(prompt) - 1 : -1])
        assert text[-1] == 0 or len(text) >= 14 + len(prompt)


def test_padding_that_a_model_does_not_bear_is_noticed(model, monkeypatch):
    assert generate._borne(model, PROMPTS[1], 4) == 4
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda attention_mask=None, **options: plain(**options))
    assert generate._borne(model, PROMPTS[1], 4) == 1


def test_a_cache_that_changes_what_is_written_is_noticed(model, monkeypatch):
    """As in some versions of transformers for some families."""
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda past_key_values=None, **options: plain(**options))
    with pytest.raises(
        RotationZooError, match="makes other text of this model token by token than in one pass"
    ):
        generate._borne(model, PROMPTS[1], 4)


def test_it_stops_where_the_model_ends(model):
    plain = write(model, PROMPTS, 20, 1000, 3)
    end = int(plain[1][12])
    for prompt, before, text in zip(
        PROMPTS, plain, generate.write(model, PROMPTS, 20, 1000, 3, GREEDY, [end, 0]), strict=True
    ):
        new = before[len(prompt) :].tolist()
        last = new.index(end) + 1 if end in new else len(new)
        assert text.tolist() == [*prompt.tolist(), *new[:last]]


def test_end_tokens_are_looked_for_where_makers_put_them(tiny, tokenizer):
    model = loading.load(
        find(str(tiny)), loading.load_config(find(str(tiny))), "cpu", torch.float32
    )
    model.generation_config.eos_token_id = [5, 6]
    assert generate.end_tokens(model, tokenizer) == [5, 6]
    model.generation_config.eos_token_id = None
    assert generate.end_tokens(model, tokenizer) == [0] == [model.config.eos_token_id]
    model.config.eos_token_id = None
    assert generate.end_tokens(model, tokenizer) == [tokenizer.eos_token_id]


def test_it_draws_from_the_models_predictions(model):
    """Of 2,000 first tokens, as many are of the 400 likeliest as the model says, within five
    standard errors."""
    prompt = torch.tensor([5, 6, 7])
    drawn = torch.stack([text[3] for text in write(model, [prompt] * 2000, 4, 8000, 2000, BARE)])
    expected = model(input_ids=prompt[None]).logits[0, -1].softmax(-1)
    likely = expected.topk(400).indices
    share, found = expected[likely].sum().item(), torch.isin(drawn, likely).double().mean().item()
    assert share > 0.5, "nothing to tell from a uniform draw, which is 0.2"
    assert abs(found - share) < 5 * (share * (1 - share) / 2000) ** 0.5


def test_a_seed_gives_the_same_text_and_leaves_the_users_own_draws_alone(model):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    one, two, other = (write(model, PROMPTS, 20, 1000, 2, BARE, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_more_is_written_than_asked_for(model):
    assert len(write(model, PROMPTS, 20, 1, 1, BARE)) == 1
    assert len(write(model, PROMPTS, 20, 30, 1)) == 2
    assert len(write(model, PROMPTS, 20, 30, 1, start=6)) == 3, (
        "what rows begin with anyway does not count"
    )


def test_settings_of_the_makers_that_would_be_in_the_way(model, monkeypatch):
    plain = write(model, PROMPTS, 20, 1000, 3)
    odd = {
        "return_dict_in_generate": True,
        "num_beams": 2,
        "max_time": 1e-9,
        "stop_strings": ["a"],
        "max_length": 5,
    }
    for name, value in odd.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert all(
        torch.equal(a, b) for a, b in zip(plain, write(model, PROMPTS, 20, 1000, 3), strict=True)
    )


def test_predictions_that_are_not_finite(tiny):
    model = loading.load(
        find(str(tiny)), loading.load_config(find(str(tiny))), "cpu", torch.float32
    )
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(RotationZooError, match="predictions are not finite"):
        write(model, PROMPTS, 20, 1000, 3)


def test_the_makers_settings_are_used(tmp_path):
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    assert generate.sampling(find(str(folder))) == BARE
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    )
    assert generate.sampling(find(str(folder))) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_prompts_are_spread_over_the_texts(tokenizer):
    found = read_prompts(SELF, tokenizer)
    texts = [json.loads(line)["text"] for line in BUNDLED.read_text().splitlines()]
    pieces = {
        tuple(ids[at : at + 16])
        for ids in tokenizer(texts).input_ids
        for at in range(0, len(ids), SELF.length)
    }
    assert all(tuple(row.tolist()) in pieces for row in found.rows)
    assert len({tuple(row.tolist()) for row in found.rows}) > 50
    assert SELF.tokens <= found.tokens < SELF.tokens + 16, "no more than could be used"


def test_chats_end_where_it_is_the_models_turn(chats, tokenizer):
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    tokenizer.chat_template = template
    whole = read_prompts(SELF.model_copy(update={"prompts": str(chats)}), tokenizer)
    found = {tokenizer.decode(row) for row in whole.rows}
    assert found == {"u:first\na:", "u:first\na:second\nu:third\na:"}
    assert whole.note is None
    short = read_prompts(
        SELF.model_copy(update={"prompts": str(chats), "length": 20, "prompt_tokens": 8}), tokenizer
    )
    assert {tokenizer.decode(row) for row in short.rows} == {"u:first\na:"}
    assert short.note == "4 of 8 chats left out: longer than half a row"


def test_a_start_token_is_given_and_not_doubled(tokenizer):
    """Of a tokenizer that starts every text with one, in prompts and in the rows that are cut from
    what is written."""
    starting = transformers.AutoTokenizer.from_pretrained(DATA / "model")
    starting._tokenizer.post_processor = __import__("tokenizers").processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    prompts = read_prompts(SELF, starting).rows
    assert all(row[0] == 0 and row[1] != 0 for row in prompts)
    rows = pack_texts(
        [torch.cat([row, torch.arange(1, 113)]) for row in prompts], SELF, starting
    ).rows
    assert all(
        torch.equal(row, torch.cat([prompt, torch.arange(1, 113)]))
        for row, prompt in zip(rows, prompts, strict=False)
    )
    assert len(rows) == 8


@pytest.mark.parametrize("stop", [("writing", 1), ("writing", 3), ("calibrating", 1)])
def test_a_stopped_job_goes_on_with_what_was_written(stop, tiny, tmp_path):
    whole = calibrate(job(tiny, tmp_path / "whole"))
    seen: list[tuple[str, int]] = []

    def interrupt(stage, done, total):
        seen.append((stage, done))
        if (stage, sum(name == stage for name, _ in seen) - 1) == stop:
            raise KeyboardInterrupt

    stopped = job(tiny, tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        calibrate(stopped, interrupt)
    assert stopped.unfinished
    again: list[tuple[str, int]] = []
    resumed = calibrate(stopped, lambda stage, done, total: again.append((stage, done)))
    written = [done for stage, done in again if stage == "writing"]
    assert written[0] == max(done for stage, done in seen if stage == "writing")
    assert (resumed.folder / "rotations.safetensors").read_bytes() == (
        whole.folder / "rotations.safetensors"
    ).read_bytes()
    assert resumed.content["calibration"] == whole.content["calibration"]
    assert [path.name for path in stopped.output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        RuntimeError(
            "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`."
        ),
    ],
    ids=["torch", "cusolver"],
)
def test_text_outlives_a_job_that_ran_out_of_memory(error, tiny, tmp_path, monkeypatch):
    """The next command is the one that its hint asks for: with another batch."""
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "collect", lambda *words: (_ for _ in ()).throw(error))
        with pytest.raises(RotationZooError, match="does not fit the device's memory"):
            calibrate(job(tiny, tmp_path))
    monkeypatch.setattr(generate, "_go_on", None)
    calibrate(replace(job(tiny, tmp_path), batch=1))


def test_sums_are_never_joined_to_another_text(tiny, tmp_path):
    def interrupt(stage, done, total):
        if stage == "calibrating" and done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(job(tiny, tmp_path), interrupt)
    path = tmp_path / "out.checkpoint.text.safetensors"
    with safe_open(path, "pt") as file:
        told = file.metadata()
    save_file({name: text.flip(0) for name, text in load_file(path).items()}, path, told)
    with pytest.raises(RotationZooError, match="of another job: written differ"):
        calibrate(job(tiny, tmp_path))


def test_the_artifact_says_whose_text_it_was(tiny, tmp_path):
    made = calibrate(job(tiny, tmp_path))
    said = made.content["calibration"]
    assert (said["source"], said["prompts"]) == ("self", "bundled")
    assert said["tokens"] == 1024
    assert said["prompts_fingerprint"] == made.content["identity"]["text"] != said["fingerprint"]
    assert (
        "1,024 tokens of prompts of `bundled` and of what the model made of them"
        in (made.folder / "README.md").read_text()
    )
    assert calibrate(job(tiny, tmp_path)).content["run"] == made.content["run"], "done already"


def test_the_settings_of_sampling_are_part_of_the_job(tiny, tmp_path):
    folder = save_tiny(tmp_path / "model")
    calibrate(job(folder, tmp_path))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    with pytest.raises(RotationZooError, match="sampling, generation_config differ"):
        calibrate(job(folder, tmp_path))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "repetition_penalty": 1.2})
    )
    with pytest.raises(RotationZooError, match="another job: generation_config differ"):
        calibrate(job(folder, tmp_path))


def test_another_jobs_text_is_refused(tiny, tmp_path):
    save_file(
        {"0": torch.zeros(3, dtype=torch.long)},
        tmp_path / "out.checkpoint.text.safetensors",
        {"identity": "{}", "texts": "1"},
    )
    with pytest.raises(RotationZooError, match="of another job"):
        calibrate(job(tiny, tmp_path))
    calibrate(job(tiny, tmp_path, restart=True))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--length", "256"], "prompts of 256 tokens leave nothing to write in rows of 256"),
        (
            ["--length", "512", "--prompts", "absent.jsonl"],
            "there is no file absent.jsonl\nHint: check the path given with --prompts",
        ),
        (
            ["--recipe", "best", "--length", "512", "--tokens", "512"],
            "of 1 there are none to spare",
        ),
        (
            ["--recipe", "best", "--length", "300", "--tokens", "3000"],
            "no held-out row is longer than 320 tokens",
        ),
    ],
)
def test_what_cannot_be_written_gets_a_sentence(words, sentence, inside, tiny, monkeypatch):
    monkeypatch.setattr(loading, "load", None)  # before anything is computed
    result = inside("calibrate", tiny, "--data", "self", *words)
    assert result.returncode == 1
    assert sentence in result.stderr


def test_prompts_are_for_text_of_the_models_own(inside):
    result = inside("calibrate", "demo", "--prompts", "questions.jsonl")
    assert result.returncode == 2
    assert "--data self" in result.stderr
    result = inside("calibrate", "demo", "--data", "self", "--prompts", "self")
    assert result.returncode == 2
    assert "needs something to go on from" in result.stderr


def test_only_a_calibration_writes(inside):
    result = inside("evaluate", "demo", "--data", "self")
    assert result.returncode == 1
    assert "writes text of its own only where it is calibrated" in result.stderr


def test_a_search_chooses_on_what_the_model_wrote(tiny, tmp_path, monkeypatch):
    rows: list[torch.Tensor] = []

    def see(model, geometry, statistics, own, fitted, held_out, *others):
        rows.extend([*fitted, *held_out])
        kept = {
            "key": {"clip": 0.9},
            "value": {"clip": 0.92},
            "by_side": {},
            "kept": "own",
            "trimmed": 0.1,
        }
        return own, {"layers": {}, "model": kept}

    monkeypatch.setattr(jobs, "search", see)
    recipe = PRESETS["best"].model_copy(update={"data": SELF, "sink": 4, "recent": 16})
    made = calibrate(Job(str(tiny), recipe, tmp_path / "out", device="cpu", batch=2))
    source = find(str(tiny))
    model, tokenizer = (
        loading.load(source, loading.load_config(source), "cpu", torch.float32),
        loading.load_tokenizer(source),
    )
    ends = generate.end_tokens(model, tokenizer)
    texts = generate.write(
        model,
        read_prompts(SELF, tokenizer).rows,
        128,
        1024,
        2,
        generate.sampling(source),
        ends,
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(rows, pack_texts(texts, SELF, tokenizer).rows, strict=True)
    )
    assert made.content["calibration"]["rows"] == len(rows) == 8
