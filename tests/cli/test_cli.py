"""The command line as a user meets it: a process of its own, an empty folder, and every mistake one
can make."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file, save_file
from support import architectures
from support.hubs import huggingface
from support.models import DATA, save_tiny

import rotationzoo
from rotationzoo import recipe as recipes
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job

SMALL = ["--tokens", "2048", "--length", "256"]


def only_error(result, code: int = 1) -> str:
    """The run failed with this code, in one `Error:` line and at most one `Hint:` line; returns
    both."""
    assert result.returncode == code, result.stderr
    lines = [
        line for line in result.stderr.strip().splitlines() if not line.startswith("[")
    ]  # nor a log of stages
    assert lines[0].startswith("Error: "), result.stderr
    assert len(lines) <= 2, result.stderr
    assert all(line.startswith("Hint: ") for line in lines[1:]), result.stderr
    assert result.stdout == ""
    return result.stderr


def left_behind(command) -> list[str]:
    return sorted(str(path.relative_to(command.folder)) for path in command.folder.rglob("*"))


# ---- what works


def test_the_journey_calibrate_inspect_verify(command):
    made = command("calibrate", "demo", "--json", *SMALL)
    assert made.returncode == 0, made.stderr
    result = json.loads(made.stdout)
    assert {
        "artifact",
        "model",
        "revision",
        "recipe",
        "layers",
        "tokens",
        "seconds",
        "peak_memory_bytes",
    } <= result.keys()
    assert (result["model"], result["recipe"], result["layers"], result["tokens"]) == (
        "demo",
        "oscar",
        4,
        2048,
    )
    assert result["orthogonality_error"] < 1e-6
    folder = result["artifact"]
    assert left_behind(command)[0:2] == ["rotations", folder]

    shown = json.loads(command("inspect", folder, "--json").stdout)
    assert [layer["layer"] for layer in shown["layers"]] == [0, 1, 2, 3]
    for layer in shown["layers"]:
        for side in (layer["key"], layer["value"]):
            assert 1 < side["effective_rank"] < 64
            assert 0 < side["top_1_share"] < side["top_8_share"] < 1
    table = command("inspect", folder).stdout
    assert "K dim" in table
    assert len(table.strip().splitlines()) == 2 + 4 + 1
    assert max(map(len, table.splitlines())) <= 120
    assert "…" not in command("inspect", folder, env={"COLUMNS": "80"}).stdout

    sound = command("verify", folder, "--model", "demo", "--json")
    assert json.loads(sound.stdout) == {
        "ok": True,
        "problems": [],
        "orthogonality_error": result["orthogonality_error"],
    }

    again = command("calibrate", "demo", "--quiet", *SMALL)
    assert (again.returncode, again.stdout.strip()) == (0, folder)

    with open(command.folder / folder / "rotations.safetensors", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x00" * 8)
    broken = command("verify", folder, "--json")
    assert broken.returncode == 1
    assert not json.loads(broken.stdout)["ok"]
    assert "is not to be used" in broken.stderr


def test_dry_run_reads_the_config_and_writes_nothing(inside):
    shown = json.loads(inside("calibrate", "demo", "--dry-run", "--json").stdout)
    assert (shown["layers"], shown["kv_heads"], shown["head_dim"], shown["refusal"]) == (
        4,
        2,
        64,
        None,
    )
    assert all(shown[key] > 0 for key in ("weights_bytes", "peak_memory_bytes", "artifact_bytes"))
    architectures.config("deepseek_v3").save_pretrained(inside.folder.parent / "mla")
    mla = inside(
        "calibrate",
        inside.folder.parent / "mla",
        "--dry-run",
        "--json",
        "--length",
        "64",
        "--tokens",
        "64",
    )
    assert mla.returncode == 0
    assert "compressed latent" in json.loads(mla.stdout)["refusal"]
    assert left_behind(inside) == []


def test_a_hub_model_is_downloaded_pinned_and_then_works_offline(command, tiny):
    with huggingface.serve_folders({"someone/tiny": tiny}) as hub:
        endpoint, requests = hub.endpoint, hub.requests
        made = command("calibrate", "someone/tiny", "--json", *SMALL, env={"HF_ENDPOINT": endpoint})
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["revision"] == hub.head("someone/tiny")
        asked = [request for request in requests if "safetensors" in request]
        assert asked, "the weights came from the hub"
        unknown = only_error(
            command("calibrate", "someone/tiny", "--revision", "v9", env={"HF_ENDPOINT": endpoint})
        )
        assert "no revision v9" in unknown
        missing = only_error(command("calibrate", "someone/tinny", env={"HF_ENDPOINT": endpoint}))
        assert "there is no model someone/tinny" in missing
    offline = command(
        "calibrate",
        "someone/tiny",
        *SMALL,
        "--output",
        "again",
        "--json",
        env={"HF_HUB_OFFLINE": "1"},
    )
    assert offline.returncode == 0, offline.stderr


def test_chats_of_a_data_set_on_the_hub(command, tiny):
    model, chats = command.folder.parent / "model", command.folder.parent / "chats"
    shutil.copytree(tiny, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    (chats / "all").mkdir(parents=True)
    configuration = (
        "configs:\n- config_name: all\n  data_files:\n  - split: train\n    path: all/train.jsonl\n"
    )
    (chats / "README.md").write_text(f"---\n{configuration}---\n")
    lines = [
        {
            "messages": [{"role": "user", "content": f"def function_{i}(self): return {i}"}],
            "source": "x",
        }
        for i in range(300)
    ]
    (chats / "all" / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "calibrate",
        model,
        *SMALL,
        "--data",
        "someone/chats",
        "--subset",
        "all",
        "--output",
        "out",
        "--json",
    ]
    with huggingface.serve_folders({"datasets/someone/chats": chats}) as hub:
        endpoint = hub.endpoint
        made = command(*words, env={"HF_ENDPOINT": endpoint})
        assert made.returncode == 0, made.stderr
        wrong = only_error(
            command(*words[:-1], "--column", "text", "--restart", env={"HF_ENDPOINT": endpoint})
        )
    assert "someone/chats has no column text: it has messages, source" in wrong
    assert json.loads(made.stdout)["tokens"] == 2048


def test_help_is_quick_to_import():
    check = (
        "import sys; from rotationzoo.cli.app import app; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'modelscope', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stdout.strip()
        == "[]"
    )


# ---- stopping


def start(command, *words) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "rotationzoo", "calibrate", "demo", *words],
        cwd=command.folder, env=command.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a suite in the background of a shell ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    recipe = recipes.override(recipes.load("oscar"), tokens=32768)
    folder = tmp_path_factory.mktemp("whole") / "out"
    return calibrate(Job(model="demo", recipe=recipe, output=folder, batch=1, device="cpu")).folder


@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "kill", "kill -9"]
)
def test_stopped_half_way_and_run_again(command, uninterrupted, how):
    words = ["--tokens", "32768", "--batch", "1", "--output", "out"]
    running = start(command, *words)
    checkpoint = command.folder / "out.checkpoint.safetensors"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    running.send_signal(how)
    _, errors = running.communicate(timeout=60)
    assert "out" not in left_behind(command), "stopped before it was done"
    if how != signal.SIGKILL:
        assert running.returncode == 130, errors
        said = [
            line for line in errors.splitlines() if not line.startswith("[")
        ]  # what a slow run logs
        assert said == [
            "Error: interrupted; what was done so far is saved",
            f"Hint: go on with: rotationzoo calibrate demo {' '.join(words)}",
        ]
    assert [name for name in left_behind(command) if not name.endswith(".lock")] in (
        ["out.checkpoint.safetensors"],
        ["out.checkpoint.safetensors", "out.checkpoint.safetensors.partial"],
    )
    resumed = command("calibrate", "demo", *words)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("rotations.safetensors", "statistics.safetensors"):
        assert (command.folder / "out" / name).read_bytes() == (uninterrupted / name).read_bytes()
    assert not [name for name in left_behind(command) if "checkpoint" in name]


def test_memory_does_not_grow_with_the_number_of_tokens(command):
    text = (DATA / "calibration.jsonl").read_text()
    (command.folder / "long.jsonl").write_text(text * 2)
    peak = {}
    for tokens in (32768, 131072):
        made = command(
            "calibrate",
            "demo",
            "--data",
            "long.jsonl",
            "--tokens",
            tokens,
            "--output",
            f"out-{tokens}",
            "--batch",
            "1",
            "--json",
        )
        result = json.loads(made.stdout)
        assert result["tokens"] == tokens
        peak[tokens] = result["peak_memory_bytes"]
    assert (
        peak[131072] < 1.05 * peak[32768]
    )  # measured 1.005, and 0.985 for a model of 32 M parameters


# ---- what can be wrong


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["./nowhere"], "there is no folder ./nowhere"),
        (["empty"], "empty is no model: the folder has no config.json"),
        (
            ["demo", "--length", "4096"],
            "rows of 4096 tokens are longer than the 2048 positions of the model",
        ),
        (["demo", "--tokens", "1000"], "1000 tokens are less than one row of 2048"),
        (["demo", "--recipe", "typo.yaml"], "unknown key 'key_clp' (did you mean 'key_clip'?)"),
        (["demo", "--recipe", "hadamar"], "did you mean 'hadamard'?"),
        (["demo", "--data", "short.txt"], "short.txt is too short for a row of 2048 tokens"),
        (["demo", "--data", "empty.jsonl"], "empty.jsonl holds no text"),
        (["demo", "--data", "other.jsonl"], "no column text or messages: it has body"),
        (["demo", "--data", "other.jsonl", "--column", "bodi"], "no column bodi: it has body"),
        (["demo", "--output", "taken"], "taken exists and is no artifact"),
        (["demo", "--output", "/proc/nothing/here"], "/proc/nothing/here cannot be written"),
    ],
)
def test_mistakes_get_one_sentence(inside, words, says):
    (inside.folder / "empty").mkdir()
    (inside.folder / "taken").mkdir()
    (inside.folder / "taken" / "file").write_text("mine")
    (inside.folder / "typo.yaml").write_text("key_clp: 0.9\n")
    (inside.folder / "short.txt").write_text("hello")
    (inside.folder / "empty.jsonl").write_text("")
    (inside.folder / "other.jsonl").write_text('{"body": "x"}\n')
    before = left_behind(inside)
    assert says in only_error(inside("calibrate", *words))
    assert left_behind(inside) == before


def test_rows_of_a_preset_are_no_longer_than_the_model_has_positions(inside):
    shown = json.loads(
        inside("calibrate", "demo", "--recipe", "best", "--dry-run", "--json").stdout
    )
    assert shown["length"] == 2048 < recipes.PRESETS["best"].data.length
    (inside.folder / "mine.yaml").write_text("data: {length: 4096}\n")
    assert "--length 2048" in only_error(
        inside("calibrate", "demo", "--recipe", "mine.yaml", "--dry-run")
    ), "a wish is no default"


def test_without_a_network(command):
    says = only_error(command("calibrate", "Qwen/Qwen3-8B"))
    assert "the hub cannot be reached and Qwen/Qwen3-8B is not in the local cache" in says
    assert left_behind(command) == []


def test_models_that_cannot_be_calibrated(inside):
    import transformers

    models = inside.folder.parent
    bert = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=4096, architectures=["BertForMaskedLM"],
    )  # fmt: skip
    configs = {
        "is an encoder": bert,
        "is an encoder-decoder": transformers.T5Config(),
        "is not a causal language model": transformers.ViTConfig(),
        "compressed latent": architectures.config("deepseek_v3", max_position_embeddings=4096),
        "code of its own": architectures.config("falcon", max_position_embeddings=4096),
    }
    for number, (says, config) in enumerate(configs.items()):
        config.save_pretrained(models / str(number))
        assert says in only_error(inside("calibrate", models / str(number)))
        planned = inside("calibrate", models / str(number), "--dry-run", "--json")
        assert planned.returncode == 0
        assert says in json.loads(planned.stdout)["refusal"]
    assert left_behind(inside) == []


def test_activations_that_are_not_finite_name_the_layer(inside, tmp_path):
    model = save_tiny(tmp_path / "broken", max_position_embeddings=2048)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("inf")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "layer 1 has key activations that are not finite" in only_error(
        inside("calibrate", model, *SMALL)
    )
    assert left_behind(inside) == []


def test_another_recipes_work_is_kept(inside, tiny):
    assert inside("calibrate", tiny, *SMALL, "--output", "out").returncode == 0
    before = (inside.folder / "out" / "manifest.json").read_bytes()
    says = only_error(inside("calibrate", tiny, *SMALL, "--output", "out", "--recipe", "oscar-v1"))
    assert "out holds the work of another recipe (oscar for" in says
    assert (inside.folder / "out" / "manifest.json").read_bytes() == before


def test_a_disk_that_fills_up(command):
    """A limit on file sizes stands for a disk that is full after some blocks: the write fails
    half-way."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    for recipe in (
        "oscar",
        "hadamard",
    ):  # at the first checkpoint, and while the artifact is written
        says = only_error(command("calibrate", "demo", "--recipe", recipe, preexec_fn=limit))
        assert "cannot be written" in says
        assert left_behind(command) == []


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk needs root"
)
@pytest.mark.parametrize("options", ["size=300k", "size=300k,ro"], ids=["full", "read-only"])
def test_a_small_or_read_only_disk(command, options):
    disk = command.folder / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        says = only_error(command("calibrate", "demo", "--output", "disk/out"))
        assert "MB free" in says or "cannot be written" in says
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_wrong_usage_exits_with_2(inside):
    assert inside("calibrate").returncode == 2
    assert inside("calibrate", "demo", "--batch", "0").returncode == 2
    assert inside("calibrate", "demo", "--dtype", "int4").returncode == 2
    assert "packing = 'tight'" in only_error(inside("calibrate", "demo", "--packing", "tight"), 2)
    assert "tokens = 0" in only_error(inside("calibrate", "demo", "--tokens", "0"), 2)
    assert "no folder that can be replaced" in only_error(
        inside("calibrate", "demo", "--output", "."), 2
    )
    assert "--device-map auto" in only_error(
        inside("calibrate", "demo", "--max-memory", "cpu=1GiB"), 2
    )
    assert "has no amount" in only_error(
        inside("calibrate", "demo", "--device-map", "auto", "--max-memory", "cpu"), 2
    )


def test_tracebacks_only_when_asked_for(command):
    assert "Traceback" in command("calibrate", "./nowhere", env={"ROTATIONZOO_DEBUG": "1"}).stderr


def test_the_demo_model_is_small_and_its_texts_are_there():
    assert sum(path.stat().st_size for path in (DATA / "model").iterdir()) <= 4_000_000
    for name in ("calibration.jsonl", "evaluation.jsonl"):
        assert 200_000 < (DATA / name).stat().st_size < 500_000


def test_the_version_and_short_help(inside):
    assert inside("--version").stdout.strip().count(".") == 2
    assert "Usage" in inside("calibrate", "-h").stdout


def test_a_full_standard_output_is_one_sentence(command):
    made = command("calibrate", "demo", "--quiet", *SMALL).stdout.strip()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rotationzoo", "inspect", made], cwd=command.folder, env=command.environment, stdout=full,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("Error: No space left on device\nHint: ")
    assert "Traceback" not in done.stderr


def test_names_that_look_like_markup_and_work_that_is_done(inside, tiny):
    shutil.copytree(tiny, inside.folder / "[bold]x")
    words = ["calibrate", "./[bold]x", *SMALL, "--output", "out"]
    first = inside(*words)
    assert "[bold]x, recipe oscar" in first.stdout
    assert "done already" not in first.stderr
    assert "done already" in inside(*words).stderr


def test_a_model_of_zeros_has_no_nan_in_its_table(inside, tmp_path):
    from safetensors.torch import load_file as load_weights

    model = save_tiny(tmp_path / "zeros")
    weights = {
        name: tensor * 0 for name, tensor in load_weights(model / "model.safetensors").items()
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    made = inside("calibrate", model, *SMALL, "--output", "out")
    assert made.returncode == 0, made.stderr
    assert "nan" not in made.stdout.lower()


def test_verify_says_whose_rotations_in_one_verdict_and_checks_only_what_holds(inside, tmp_path):
    """Own rotations of 2,048 tokens, learned ones too; a model of the same shape and other
    weights."""
    from rotationzoo.recipe import Search

    other = tmp_path / "other"
    shutil.copytree(DATA / "model", other)
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: -tensor for name, tensor in weights.items()},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name, search in (
        ("plain", None),
        ("learned", Search(steps=2, texts=1, queries=4, starts=1)),
    ):
        recipe = recipes.override(recipes.load("oscar"), tokens=2048, length=512).model_copy(
            update={"search": search}
        )
        artifact = calibrate(
            Job(model="demo", recipe=recipe, output=inside.folder / name, device="cpu")
        ).folder
        shown = inside("verify", artifact, "--model", "demo", "--run")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.count("made of these weights, or of close relatives") == 1
        assert "not clear" not in shown.stdout
        assert "the weights of demo" in shown.stdout.splitlines()[-1]
    wrong = inside("verify", "plain", "--model", other)
    assert wrong.returncode == 1
    assert "Problem: made for other weights than those of" in wrong.stdout
    assert "the weights" not in wrong.stdout.splitlines()[-1], "which differ"


def test_a_package_that_is_not_installed_knows_its_version(command):
    """Run from a path, where Python's metadata has nothing of it: found out before the first pass,
    not after the last."""
    program = (
        "from importlib import metadata; real = metadata.Distribution.from_name\n"
        "def find(name):\n"
        "    if name == 'rotationzoo': raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.Distribution.from_name = find\n"
        "from rotationzoo.cli.app import app; app()"
    )
    words = ["calibrate", "demo", "--recipe", "hadamard", "--output", "made", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=command.folder,
        env=command.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    versions = json.loads((command.folder / "made" / "manifest.json").read_text())["versions"]
    assert versions["rotationzoo"] == rotationzoo.__version__
