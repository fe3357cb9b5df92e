"""What a rotation costs a model: the report."""

import json
import math
import shutil

import pytest
import torch
import transformers
from support import architectures
from support.models import save_family, save_tiny

from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.cli.evaluate import parse_layers
from rotationzoo.cli.option_values import parse_windows
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS, Data, Recipe

SMALL = Data(tokens=1024, length=256)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.fixture(scope="module")
def models_and_artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    artifacts = [
        calibrate(
            Job(
                "demo",
                recipe.model_copy(update={"data": Data(tokens=2048, length=512)}),
                folder / recipe.name,
            )
        ).folder
        for recipe in (PRESETS["oscar"], PRESETS["oscar-v1"])
    ]
    return folder, artifacts


def test_the_report(models_and_artifacts):
    _, artifacts = models_and_artifacts
    job = Evaluation(
        "demo",
        artifacts,
        Data(tokens=2048, length=512),
        windows=[(16, 64), (64, 256)],
        queries=16,
        save_to=artifacts,
    )
    report = evaluate(job)
    names = ["oscar", "oscar-v1", "identity", "hadamard", "random"]
    assert list(report["arms"]) == names
    assert report["first_position"] == 320, "the same tokens for every window"
    assert report["tokens"] == 4 * (512 - 320 - 1)
    small, large = (window["arms"] for window in report["windows"])
    assert small == report["arms"]
    for name in names:
        for arm in (small[name], large[name]):
            assert arm["perplexity"] == pytest.approx(
                report["exact"]["perplexity"] * (1 + arm["perplexity_increase"])
            )
            assert arm["standard_error"]["perplexity_increase"] > 0
            assert [bucket["from"] for bucket in arm["by_length"]] == [320]
        assert small[name]["attention_kl"] > large[name]["attention_kl"] > 0
        assert small[name]["output_error"] > large[name]["output_error"] > 0
        assert small[name]["bits_per_element"] < large[name]["bits_per_element"]
    assert small["oscar"]["attention_kl"] < small["identity"]["attention_kl"]
    for folder in artifacts:
        saved = Artifact.open(folder)
        assert verify(saved, "demo").ok
        content = json.loads((folder / "evaluation.json").read_text())
        assert list(content["windows"][0]["arms"]) == [
            folder.name,
            "identity",
            "hadamard",
            "random",
        ]
        assert f"| {folder.name} |" in (folder / "README.md").read_text()
    again = evaluate(
        Evaluation(
            "demo", artifacts[:1], Data(tokens=2048, length=512), windows=[(16, 64)], queries=16
        )
    )
    assert again["first_position"] == 80
    repeated = evaluate(job)
    assert repeated["arms"] == report["arms"]


def test_perplexity_is_that_of_the_model(models_and_artifacts):
    report = evaluate(Evaluation("demo", [], Data(tokens=512, length=512), queries=0, device="cpu"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        architectures_demo(), dtype=torch.float32
    )
    from rotationzoo.model import loading
    from rotationzoo.model.source import find
    from rotationzoo.text.documents import HELD_OUT
    from rotationzoo.text.rows import read_corpus

    text = read_corpus(
        Data(source=str(HELD_OUT), tokens=512, length=512),
        loading.load_tokenizer(find("demo")),
    )
    ids = text.rows[0][None]
    loss = torch.nn.functional.cross_entropy(logits(model, ids)[0, 320:-1], ids[0, 321:])
    assert report["exact"]["perplexity"] == pytest.approx(math.exp(loss.item()), rel=1e-5)
    assert all(arm["attention_kl"] is None for arm in report["arms"].values())


def architectures_demo():
    from rotationzoo.model.source import DEMO

    return DEMO


def test_one_cause_at_a_time(models_and_artifacts):
    """Layers and sides that are not selected stay exact."""
    one = dict(data=Data(tokens=512, length=512), windows=[(4, 16)], queries=8)
    both = evaluate(Evaluation("demo", [], **one))["arms"]["random"]
    keys = evaluate(Evaluation("demo", [], sides=("key",), **one))["arms"]["random"]
    values = evaluate(Evaluation("demo", [], sides=("value",), **one))["arms"]["random"]
    layer = evaluate(Evaluation("demo", [], layers={1}, **one))
    assert values["attention_kl"] < 1e-6 < keys["attention_kl"]
    assert max(keys["output_error"], values["output_error"]) < both["output_error"]
    assert layer["layers"] == [1]
    assert abs(layer["arms"]["random"]["perplexity_increase"]) < abs(both["perplexity_increase"])


def test_a_layer_in_2_bits_is_so_for_all_that_read_its_cache(tmp_path):
    """In a model whose last layers share caches, each of them reads what the first of its kind has
    stored."""
    folder = save_family("gemma4", tmp_path / "gemma4", vocab_size_per_layer_input=2048)
    one = dict(data=Data(tokens=32, length=32), windows=[(2, 4)], queries=4)
    report = evaluate(Evaluation(str(folder), [], layers={1}, **one))
    owners = {layer.index: layer.owner for layer in geometry_of(architectures.build("gemma4"))}
    assert report["layers"] == [layer for layer, owner in owners.items() if owner == 1]
    assert len(report["layers"]) > 1
    assert min(layer["attention_kl"] for layer in report["arms"]["random"]["by_layer"]) > 0
    with pytest.raises(
        UsageError, match=r"layer 3 of .* stores nothing: it reads the cache of layer 1"
    ) as refusal:
        evaluate(Evaluation(str(folder), [], layers={0, 3}, **one))
    assert refusal.value.hint == "name that layer: --layers 1"


def test_chunked_prefill_reads_less_of_the_quantized_history():
    """The fewer the more of it is kept exact: a chunk of its own, and a window before it that no
    server keeps."""
    one = dict(data=Data(tokens=1024, length=512), windows=[(4, 64)], queries=16)
    decode = evaluate(Evaluation("demo", [], **one))
    server = evaluate(Evaluation("demo", [], prefill_chunk=256, **one))
    window = evaluate(Evaluation("demo", [], prefill_chunk=256, prefill_layout="window", **one))
    kl = [report["arms"]["identity"]["attention_kl"] for report in (window, server, decode)]
    assert 0 < kl[0] < kl[1] < kl[2]
    assert [report["prefill_layout"] for report in (decode, server, window)] == [
        None,
        "server",
        "window",
    ]


def test_how_it_was_prefilled_is_said_wherever_the_figures_are(
    inside, models_and_artifacts, tmp_path
):
    _, (made, _) = models_and_artifacts
    folder = tmp_path / "made"
    shutil.copytree(made, folder)
    words = [
        "evaluate",
        "demo",
        folder,
        "--tokens",
        512,
        "--length",
        512,
        "--queries",
        0,
        "--windows",
        "4/64",
        "--save",
    ]
    for options, between in (
        (["--prefill-chunk", 256], "between which only the sink stays exact"),
        (
            ["--prefill-chunk", 256, "--prefill-layout", "window"],
            "between which the sink and the recent tokens stay exact",
        ),
    ):
        shown = inside(*words, *options)
        assert shown.returncode == 0, shown.stderr
        for text in (shown.stdout, (folder / "README.md").read_text(encoding="utf-8")):
            assert f"prefilled in chunks of 256 tokens {between}" in " ".join(text.split())
        layout = options[-1] if len(options) > 2 else "server"
        assert json.loads((folder / "evaluation.json").read_text())["prefill_layout"] == layout
    assert inside(*words).returncode == 0
    assert "prefilled" not in (folder / "README.md").read_text(encoding="utf-8")
    wrong = inside(*words, "--prefill-layout", "window")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Error: --prefill-layout is for a prefill in chunks")


def test_notes_for_the_reader(models_and_artifacts, tmp_path):
    folder, _ = models_and_artifacts
    other = save_tiny(tmp_path / "other", num_hidden_layers=2)
    made = calibrate(Job(str(other), Recipe(data=SMALL), tmp_path / "made")).folder
    twin = save_tiny(tmp_path / "twin", num_hidden_layers=2)
    state = transformers.AutoModelForCausalLM.from_pretrained(twin)
    with torch.no_grad():
        state.model.layers[0].self_attn.q_proj.weight.mul_(2)
    state.save_pretrained(twin)
    notes = evaluate(
        Evaluation(str(twin), [made], Data(tokens=512, length=512), windows=[(4, 16)], queries=0)
    )["notes"]
    assert any("made for other weights" in note for note in notes)
    from rotationzoo.text.documents import BUNDLED

    seen = Data(source=str(BUNDLED), tokens=2048, length=512)
    notes = evaluate(Evaluation("demo", [folder / "oscar"], seen, queries=0))["notes"]
    assert any("calibrated on this very text" in note for note in notes)


def test_what_does_not_fit_is_refused_before_the_weights(models_and_artifacts, tmp_path, tiny):
    folder, _ = models_and_artifacts
    with pytest.raises(RotationZooError, match="made for a model of other layers"):
        evaluate(Evaluation(str(tiny), [folder / "oscar"], SMALL))
    with pytest.raises(RotationZooError, match="are too short"):
        evaluate(Evaluation("demo", [], SMALL))
    with pytest.raises(UsageError, match="no attention in layer 9: it has layers 0 to 3"):
        evaluate(Evaluation("demo", [], Data(tokens=512, length=512), layers={9}))
    with pytest.raises(RotationZooError, match="is no artifact"):
        evaluate(Evaluation("demo", [tmp_path], SMALL))
    for text in ("64", "a/b", "64/256,"):
        if text != "64/256,":
            with pytest.raises(UsageError, match="--windows"):
                parse_windows(text)
    assert parse_windows("64/256,128/1024") == [(64, 256), (128, 1024)]
    assert parse_layers("0,4-6") == {0, 4, 5, 6}
    assert parse_windows("4/16,8/32,4/16") == [(4, 16), (8, 32)]
    for text in ("0,x", "3-1", ""):
        with pytest.raises(UsageError, match="--layers"):
            parse_layers(text)


def test_the_command_line(command):
    made = command("calibrate", "demo", "--quiet", "--tokens", "1024", "--length", "256")
    folder = made.stdout.strip()
    words = [
        "evaluate",
        "demo",
        folder,
        "--tokens",
        "1024",
        "--length",
        "512",
        "--windows",
        "16/64,64/256",
    ]
    shown = command(*words, "--save", "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert {"tokens", "exact", "arms"} <= report.keys()
    assert {"perplexity", "perplexity_increase", "attention_kl", "output_error"} <= report["arms"][
        "demo-oscar"
    ].keys()
    table = command(*words, env={"COLUMNS": "80"})
    assert table.returncode == 0
    assert "…" not in table.stdout
    assert max(map(len, (line for line in table.stdout.splitlines() if "  " in line))) <= 80, (
        "tables"
    )
    assert command("verify", folder).returncode == 0
    wrong = command("evaluate", "demo", folder, "--keys-only", "--values-only")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Error: --keys-only and --values-only")
