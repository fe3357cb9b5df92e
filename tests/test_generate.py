"""Text that a model writes itself, and calibration on it."""

import json

import pytest
import torch
import transformers
from conftest import DATA, save_tiny
from safetensors.torch import save_file

from rotationzoo import corpus, generate, models
from rotationzoo.calibrate import calibrate
from rotationzoo.errors import RotationZooError
from rotationzoo.plan import Job
from rotationzoo.recipe import PRESETS, Data, Recipe
from rotationzoo.source import find

GREEDY = {"temperature": 1e-4, "top_k": 0, "top_p": 1.0}
BARE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15])]
SELF = Data(source="self", tokens=1024, length=128, prompt_tokens=16)


@pytest.fixture(scope="module")
def model(tiny):
    return models.load(find(str(tiny)), models.load_config(find(str(tiny))), "cpu", torch.float32)


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


def job(model, folder, data=SELF, **changes) -> Job:
    return Job(model=str(model), recipe=Recipe(data=data), output=folder / "out", device="cpu", batch=2, **changes)


def test_every_token_is_the_models_own_choice(model):
    """Of prompts of unequal lengths, continued together: what a pass over the whole text would choose next."""
    texts = generate.write(model, PROMPTS, 20, 1000, 3, GREEDY)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert torch.equal(text[: len(prompt)], prompt)
        chosen = model(input_ids=text[None]).logits[0].argmax(-1)
        assert torch.equal(text[len(prompt) :], chosen[len(prompt) - 1 : -1])
        assert len(text) == 20 or text[-1] == 0


def test_it_stops_where_the_model_ends(model, monkeypatch):
    plain = generate.write(model, PROMPTS, 20, 1000, 3, GREEDY)
    end = int(plain[1][12])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end, 0])
    for prompt, before, text in zip(PROMPTS, plain, generate.write(model, PROMPTS, 20, 1000, 3, GREEDY), strict=True):
        new = before[len(prompt) :].tolist()
        last = new.index(end) + 1 if end in new else len(new)
        assert text.tolist() == [*prompt.tolist(), *new[:last]]


def test_it_draws_from_the_models_predictions(model):
    """Of 2,000 first tokens, as many are of the 400 likeliest as the model says, within five standard errors."""
    prompt = torch.tensor([5, 6, 7])
    drawn = torch.stack([text[3] for text in generate.write(model, [prompt] * 2000, 4, 8000, 2000, BARE)])
    expected = model(input_ids=prompt[None]).logits[0, -1].softmax(-1)
    likely = expected.topk(400).indices
    share, found = expected[likely].sum().item(), torch.isin(drawn, likely).double().mean().item()
    assert share > 0.5, "nothing to tell from a uniform draw, which is 0.2"
    assert abs(found - share) < 5 * (share * (1 - share) / 2000) ** 0.5


def test_a_seed_gives_the_same_text_and_leaves_the_users_own_draws_alone(model):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    one, two, other = (generate.write(model, PROMPTS, 20, 1000, 2, BARE, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_more_is_written_than_asked_for(model):
    assert len(generate.write(model, PROMPTS, 20, 1, 1, BARE)) == 1
    assert len(generate.write(model, PROMPTS, 20, 30, 1, GREEDY)) == 2


def test_the_makers_settings_are_used(tmp_path):
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    assert generate.sampling(find(str(folder))) == BARE
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95}))
    assert generate.sampling(find(str(folder))) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_prompts_are_spread_over_the_texts(tokenizer):
    found = corpus.prompts(SELF, tokenizer)
    texts = [json.loads(line)["text"] for line in corpus.BUNDLED.read_text().splitlines()]
    pieces = {tuple(ids[at : at + 16]) for ids in tokenizer(texts).input_ids for at in range(0, len(ids), SELF.length)}
    assert all(tuple(row.tolist()) in pieces for row in found.rows)
    assert len({tuple(row.tolist()) for row in found.rows}) > 50
    assert SELF.tokens <= found.tokens < 4 * SELF.tokens, "no more than could be used"


def test_chats_end_where_it_is_the_models_turn(chats, tokenizer):
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    tokenizer.chat_template = template
    rows = corpus.prompts(SELF.model_copy(update={"prompts": str(chats)}), tokenizer).rows
    found = {tokenizer.decode(row) for row in rows}
    assert found == {"u:first\na:", "u:first\na:second\nu:third\na:"}
    short = SELF.model_copy(update={"prompts": str(chats), "length": 20, "prompt_tokens": 8})
    assert {tokenizer.decode(row) for row in corpus.prompts(short, tokenizer).rows} == {"u:first\na:"}, "others fill half a row"


def test_a_start_token_is_given_and_not_doubled(tokenizer):
    """Of a tokenizer that starts every text with one, in prompts and in the rows that are cut from what is written."""
    starting = transformers.AutoTokenizer.from_pretrained(DATA / "model")
    starting._tokenizer.post_processor = __import__("tokenizers").processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    prompts = corpus.prompts(SELF, starting).rows
    assert all(row[0] == 0 and row[1] != 0 for row in prompts)
    rows = corpus.written([torch.cat([row, torch.arange(1, 113)]) for row in prompts], SELF, starting).rows
    assert all(torch.equal(row, torch.cat([prompt, torch.arange(1, 113)])) for row, prompt in zip(rows, prompts, strict=False))
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
    assert (resumed.folder / "rotations.safetensors").read_bytes() == (whole.folder / "rotations.safetensors").read_bytes()
    assert resumed.manifest["calibration"] == whole.manifest["calibration"]
    assert [path.name for path in stopped.output.parent.iterdir()] == ["out"]


def test_the_artifact_says_whose_text_it_was(tiny, tmp_path):
    made = calibrate(job(tiny, tmp_path))
    said = made.manifest["calibration"]
    assert said["source"], said["prompts"] == ("self", "bundled")
    assert said["tokens"] == 1024
    assert said["prompts_fingerprint"] == made.manifest["identity"]["text"] != said["fingerprint"]
    assert "1,024 tokens of the model's own, continuing prompts of `bundled`" in (made.folder / "README.md").read_text()
    assert calibrate(job(tiny, tmp_path)).manifest["run"] == made.manifest["run"], "done already"


def test_the_settings_of_sampling_are_part_of_the_job(tiny, tmp_path):
    folder = save_tiny(tmp_path / "model")
    calibrate(job(folder, tmp_path))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    with pytest.raises(RotationZooError, match="sampling, generation_config differ"):
        calibrate(job(folder, tmp_path))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "repetition_penalty": 1.2}))
    with pytest.raises(RotationZooError, match="another job: generation_config differ"):
        calibrate(job(folder, tmp_path))


def test_another_jobs_text_is_refused(tiny, tmp_path):
    save_file(
        {"0": torch.zeros(3, dtype=torch.long)}, tmp_path / "out.checkpoint.text.safetensors", {"identity": "{}", "done": "1"}
    )
    with pytest.raises(RotationZooError, match="of another job"):
        calibrate(job(tiny, tmp_path))
    calibrate(job(tiny, tmp_path, restart=True))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--length", "256"], "prompts of 256 tokens leave nothing to write in rows of 256"),
        (["--length", "512", "--prompts", "absent.jsonl"], "there is no file absent.jsonl"),
        (["--recipe", "best", "--length", "512", "--tokens", "1024"], "2 rows are too few to choose on"),
    ],
)
def test_what_cannot_be_written_gets_a_sentence(words, sentence, inside, tiny, monkeypatch):
    monkeypatch.setattr(models, "load", None)  # before anything is computed
    result = inside("calibrate", tiny, "--data", "self", *words)
    assert result.returncode == 1
    assert sentence in result.stderr


def test_prompts_are_for_text_of_the_models_own(inside):
    result = inside("calibrate", "demo", "--prompts", "questions.jsonl")
    assert result.returncode == 2
    assert "--data self" in result.stderr


def test_only_a_calibration_writes(inside):
    result = inside("evaluate", "demo", "--data", "self")
    assert result.returncode == 1
    assert "writes text of its own only where it is calibrated" in result.stderr


def test_a_search_chooses_on_what_the_model_wrote(tiny, tmp_path):
    changes = {"data": SELF, "sink": 2, "recent": 4}
    search = PRESETS["best"].search.model_copy(update={"steps": 2, "queries": 4, "texts": 2})
    recipe = PRESETS["best"].model_copy(update={**changes, "search": search})
    made = calibrate(Job(str(tiny), recipe, tmp_path / "out", device="cpu", batch=4))
    assert made.manifest["search"]["model"]["kept"] in ("own", "keys", "values", "both")
    assert made.manifest["calibration"]["source"] == "self"
