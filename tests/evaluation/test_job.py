"""What a rotation costs a model: the simulated cache against one that is really read token by
token, and the report."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from support import architectures
from support.architectures import EXPECTED, NAMES
from support.models import save_family, save_tiny

from rotationzoo.artifact.store import Artifact
from rotationzoo.cache import simulated as simulating
from rotationzoo.cache.simulated import Arm, Cache, Simulation
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.cli.evaluate import parse_layers
from rotationzoo.cli.option_values import parse_windows
from rotationzoo.codec import int2
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.job import Evaluation, attention_modules, evaluate
from rotationzoo.model.capture import Attention
from rotationzoo.model.geometry import cached_layers, geometry_of, shifted_layers
from rotationzoo.recipe import PRESETS, Data, Recipe
from rotationzoo.rotations import Rotations

IDS = torch.randint(3, 59, (2, 24), generator=torch.Generator().manual_seed(1))
SMALL = Data(tokens=1024, length=256)
SHIFTED = (
    "gemma2",
    "gpt_oss",
    "mimo_v2_flash",
)  # a soft cap, and learned sinks in all layers or in those with a window
calibrated = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not architectures.available(name), reason="not in this transformers"
        ),
    )
    for name in NAMES
    if not EXPECTED[name].refusal
]


def logits(model, ids=IDS, **options):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **options).logits


def simulate(model, arm, cache, ids=IDS, queries=None, **options):
    """Logits, and by layer the outputs (simulated, exact) and the KL."""
    geometry = geometry_of(model)
    outputs, divergences = {}, {}
    simulation = Simulation(
        arm, cache, geometry, {layer.index for layer in geometry}, queries=queries, **options
    )
    with simulation.running(
        model,
        attention_modules(model, ids),
        lambda layer, output, exact: outputs.update({layer: (output, exact)}),
        lambda layer, kl, _: divergences.update({layer: kl}),
    ):
        return logits(model, ids), outputs, divergences


@pytest.fixture
def asked(monkeypatch):
    """A simulation, the question which mask a layer gets, and a list of the queries that a mask was
    really made for."""
    model = architectures.build("llama")
    simulation = Simulation(
        random_arm(model), Cache(sink=1, recent=2), geometry_of(model), {0, 1, 2, 3}
    )
    made = []

    def note(attend, query, cache):
        made.append(query)
        return real(attend, query, cache)

    real = simulating.doubled
    monkeypatch.setattr(simulating, "doubled", note)
    # No shapes are known of what depends on values, on `meta`.
    monkeypatch.setattr(simulating, "blocks_of", lambda mask: [])

    def ask(mask, length=8, device="cpu"):
        query = torch.zeros(1, 4, length, 16, device=device)
        return simulation._doubled(Attention(model, lambda *_: None, mask, {}), query).whole

    return ask, made


def test_layers_on_a_second_device_get_a_mask_of_their_own(asked):
    """Under sdpa every layer of full attention is handed None, wherever it is and however long the
    row."""
    ask, made = asked
    first, second, longer = ask(None), ask(None, device="meta"), ask(None, length=9)
    assert (first.device.type, second.device.type) == ("cpu", "meta")
    assert (first.shape[-2:], longer.shape[-2:]) == ((8, 16), (9, 18))
    assert ask(None) is first
    assert ask(None, device="meta") is second
    assert len(made) == 3


def test_layers_that_are_handed_copies_of_one_mask_share_what_is_made_of_it(asked):
    """accelerate gives each layer that is not on the first device a copy of its own."""
    ask, made = asked
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    window = mask & ~torch.ones_like(mask).tril(-3)
    whole, narrow = ask(mask), ask(window)
    assert ask(mask.clone()) is whole
    assert ask(window.clone()) is narrow
    assert not torch.equal(whole, narrow)
    assert len(made) == 2


def random_arm(model) -> Arm:
    return Arm("random", fit(None, PRESETS["random"], geometry_of(model)))


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Rows as short as these would be read in one block of queries."""
    monkeypatch.setattr(simulating, "_QUERIES", 7)


@pytest.mark.parametrize("name", calibrated)
def test_a_cache_that_keeps_everything_exact_changes_nothing(name):
    """Windows, soft caps and sinks stay the model's although every position is there twice."""
    model = architectures.build(name)
    plain = logits(model)
    found, outputs, divergences = simulate(
        model, random_arm(model), Cache(sink=24, recent=0), queries=torch.arange(24)
    )
    assert (found - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert len(outputs) == len(divergences) == len(geometry_of(model))
    assert max(kl.abs().max().item() for kl in divergences.values()) < 1e-6


def with_key_means(rotations: Rotations, means: dict[int, torch.Tensor]) -> Rotations:
    return rotations.replace(
        lambda layer, side, rotation: (
            replace(rotation, mean=means[layer]) if side == "key" else rotation
        )
    )


def test_keys_far_from_zero_are_stored_far_better_without_their_mean():
    arm = random_arm(architectures.build("llama"))
    shift = 50 * torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    shifted = with_key_means(arm.rotations, dict.fromkeys(range(4), shift))
    rows = torch.randn(2, 2, 8, 16) + shift[:, None]
    centered = Arm("centered", shifted).stored(rows, 0, "key", int2.SGLANG) + shift[:, None]
    assert (centered - rows).norm() < 0.2 * (arm.stored(rows, 0, "key", int2.SGLANG) - rows).norm()
    values = torch.randn(2, 2, 8, 16)
    same = [a.stored(values, 0, "value", int2.SGLANG) for a in (arm, Arm("centered", shifted))]
    assert torch.equal(*same)


@pytest.mark.parametrize("name", calibrated)
def test_what_centring_moves_is_seen(name):
    """A server never adds the mean of keys back, so nor does the simulation: where attention does
    not ignore it, evaluation shows what that costs, and the look at the model says so before."""
    model = architectures.build(name)
    geometry = geometry_of(model)
    arm = random_arm(model)
    generator = torch.Generator().manual_seed(0)
    means = {
        layer.index: 3 * torch.randn(layer.kv_heads, layer.key_dim, generator=generator)
        for layer in cached_layers(geometry)
    }
    plain = logits(model)
    found, _, divergences = simulate(
        model,
        Arm("centered", with_key_means(arm.rotations, means)),
        Cache(sink=24, recent=0),
        queries=torch.arange(24),
    )
    moved = ((found - plain).abs().max() / plain.abs().max()).item()
    kl = max(divergence.max().item() for divergence in divergences.values())
    if shifted_layers(geometry):
        assert (name in SHIFTED, moved > 0.01, kl > 0.01) == (True, True, True), (moved, kl)
    else:
        assert (name in SHIFTED, moved < 1e-4, kl < 1e-6) == (False, True, True), (moved, kl)


@pytest.mark.parametrize("name", calibrated)
def test_a_cache_that_keeps_nothing_changes_everything_and_is_undone(name):
    model = architectures.build(name)
    plain = logits(model)
    found, outputs, divergences = simulate(
        model, random_arm(model), Cache(sink=0, recent=0), queries=torch.arange(24)
    )
    assert (found - plain).abs().max() > 1e-4 * plain.abs().max()
    assert all((output - exact).norm() > 1e-3 * exact.norm() for output, exact in outputs.values())
    assert max(kl.max().item() for kl in divergences.values()) > 1e-6
    assert torch.equal(logits(model), plain), "not restored"


def really_read(model, arm: Arm, cache: Cache, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a server: token by token (or chunk by chunk) with a cache whose older entries
    are stored in 2 bits."""
    layers = [layer.index for layer in cached_layers(geometry_of(model))]
    exact: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    found, step = [], cache.prefill_chunk or 1
    for start in range(0, ids.shape[1], step):
        stop = min(start + step, ids.shape[1])
        # The recent tokens end with a query's own, or before its chunk; a server has written them
        # in 2 bits by then.
        end = start if cache.prefill_chunk else start + 1
        recent = 0 if cache.prefill_chunk and cache.prefill_layout == "server" else cache.recent
        past = transformers.DynamicCache()
        if exact:
            position = torch.arange(start)
            kept = (position < cache.sink) | (position >= end - recent)
            for layer in layers:
                mixed = [
                    torch.where(kept[:, None], rows, arm.stored(rows, layer, side, cache.format))
                    for rows, side in zip(exact[layer], ("key", "value"), strict=True)
                ]
                past.update(*mixed, layer)
        with torch.no_grad():
            result = model(input_ids=ids[:, start:stop], past_key_values=past, use_cache=True)
        found.append(result.logits)
        for layer in layers:
            new = [t[:, :, start:] for t in (past.layers[layer].keys, past.layers[layer].values)]
            exact[layer] = (
                tuple(torch.cat(pair, 2) for pair in zip(exact[layer], new, strict=True))
                if start
                else tuple(new)
            )
    return torch.cat(found, dim=1)


CACHES = {
    "decode": Cache(sink=2, recent=5),
    "server": Cache(sink=3, recent=4, prefill_chunk=7),
    "window": Cache(sink=3, recent=4, prefill_chunk=7, prefill_layout="window"),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize(
    "name", [n for n in ("llama", "qwen3", "mistral", "gemma2", "gpt_oss") if n in NAMES]
)
def test_the_simulation_is_what_a_server_computes(name, cache):
    model = architectures.build(name)
    arm = random_arm(model)
    served = really_read(model, arm, cache, IDS)
    found, _, _ = simulate(model, arm, cache)
    assert (found - served).abs().max() <= 2e-5 * served.abs().max()
    plain = logits(model)
    assert (served - plain).abs().max() > 1e-3 * plain.abs().max(), (
        "the cache does change something here"
    )


def test_windows_and_chunks_decide_what_is_exact():
    decode = Cache(sink=1, recent=2).exact(5).int().tolist()
    assert [row[: t + 1] for t, row in enumerate(decode)] == [
        [1],
        [1, 1],
        [1, 1, 1],
        [1, 0, 1, 1],
        [1, 0, 0, 1, 1],
    ]
    window = (
        Cache(sink=1, recent=1, prefill_chunk=3, prefill_layout="window").exact(9).int().tolist()
    )
    assert window[2][:3] == [1, 1, 1]
    assert window[5][:6] == [1, 0, 1, 1, 1, 1]
    assert window[6][:7] == [1, 0, 0, 0, 0, 1, 1]
    server = Cache(sink=1, recent=1, prefill_chunk=3).exact(9).int().tolist()
    assert server[2][:3] == [1, 1, 1]
    assert server[5][:6] == [1, 0, 0, 1, 1, 1]
    assert server[6][:7] == [1, 0, 0, 0, 0, 0, 1]
    for cache in (
        Cache(),
        Cache(sink=1, recent=2),
        Cache(sink=0, recent=3, prefill_chunk=4),
        Cache(sink=5, recent=9, prefill_chunk=7),
        Cache(sink=0, recent=3, prefill_chunk=4, prefill_layout="window"),
        Cache(sink=5, recent=9, prefill_chunk=7, prefill_layout="window"),
        Cache(sink=7, recent=9, prefill_chunk=7),
    ):
        exact = cache.exact(400)
        reads = [t for t in range(400) if not exact[t, : t + 1].all()]
        assert reads[0] == cache.first_quantized


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
    from rotationzoo.text import documents

    text = documents.read(
        Data(source=str(documents.HELD_OUT), tokens=512, length=512),
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


def test_int2_is_what_the_cache_stores(models_and_artifacts):
    """An arm's copy is rotation, clip, codec and back, with the artifact's own clip ratios."""
    folder, _ = models_and_artifacts
    rotations = Artifact.open(folder / "oscar").rotations
    x = torch.randn(1, 2, 7, 64, generator=torch.Generator().manual_seed(0))
    stored = Arm("oscar", rotations).stored(x, 1, "value", int2.SGLANG)
    rotation = rotations[1].value.matrix
    expected = torch.stack(
        [int2.round_trip(x[0, h] @ rotation[h], 0.92) @ rotation[h].mT for h in range(2)]
    )
    assert torch.allclose(stored[0], expected, atol=1e-6)
