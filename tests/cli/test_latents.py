"""A model with latents (MLA) through the commands, and one sentence for what does not fit it."""

import pytest
from support.command_line import only_error
from support.models import save_family, save_tiny
from support.vllm import pretend

from rotationzoo import calibrate
from rotationzoo.vllm import plugin


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """The folders of two models, one with latents, and of an artifact of each."""
    folder = tmp_path_factory.mktemp("latents")
    save_family("deepseek_v3", folder / "latent", kv_lora_rank=32)
    save_tiny(folder / "heads")
    options = dict(tokens=512, length=256, device="cpu")
    for name in ("latent", "heads"):
        calibrate(str(folder / name), output=folder / f"of-{name}", **options)
    return {path.name: str(path) for path in folder.iterdir()}


def test_calibrate_says_what_is_cached(inside, names):
    shown = inside("calibrate", names["latent"], "--dry-run").stdout
    assert "4 layers with a cache, latents of 32 elements" in shown
    table = inside("inspect", names["of-latent"]).stdout
    assert "0      latent" in table
    assert "value" not in table
    assert "Centered: latents lose the mean" in table


@pytest.mark.parametrize("words", ["evaluate {} {}", "generate {} --rotations {} -p x"])
@pytest.mark.parametrize(("model", "other"), [("latent", "heads"), ("heads", "latent")])
def test_rotations_of_the_other_kind_are_refused(inside, names, words, model, other):
    kinds = {"latent": "latents (MLA)", "heads": "keys and values"}
    said = only_error(inside(*words.format(names[model], names[f"of-{other}"]).split()))
    assert f"of-{other} holds rotations of {kinds[other]}, and " in said
    assert said.splitlines()[0].endswith(f"caches {kinds[model]}")


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["calibrate", "--recipe", "oscar-v1"], "latents have no statistics query and key_", 1),
        (["calibrate", "--key-bits", "3", "--value-bits", "3"], "leave no bits for latents", 1),
        (["evaluate", "--rivals", "q4_0"], "q4_0 stores keys and values, and this model", 2),
    ],
)
def test_what_latents_do_not_have_is_refused(inside, names, words, says, code):
    command, *options = words
    assert says in only_error(inside(command, names["latent"], *options), code)


@pytest.mark.parametrize("package", [plugin.CPU_PACKAGE, plugin.GPU_PACKAGE])
def test_serve_takes_latents_that_are_read_whole(inside, names, package, tmp_path, monkeypatch):
    """Others are refused before anything is calibrated."""
    pretend(monkeypatch, package)
    done = inside("serve", names["latent"], "--rotations", names["of-latent"], "--dry-run")
    assert done.returncode == 0
    # 390 pages of 64 tokens, in each of 4 layers 32 + 8 elements of 2 bytes
    assert f"{390 * 64 * 4 * 40 * 2 / 1e6:.3g} MB for 64 requests" in done.stderr
    sparse = save_family("deepseek_v3", tmp_path / "sparse", kv_lora_rank=32, index_topk=4)
    said = only_error(inside("serve", sparse))
    assert "not served with sparse attention over latents" in said
