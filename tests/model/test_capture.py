import logging
from collections.abc import Iterable

import pytest
import torch
import transformers
from support import architectures
from support.architectures import CALIBRATED, EXPECTED, NAMES, families
from support.caches import read_whole
from support.places import ROOT

from rotationzoo.artifact.layout import statistics_tensors
from rotationzoo.calibration.collect import collect
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.geometry import cached_layers, shifted_layers
from rotationzoo.linalg.moments import average
from rotationzoo.model import geometry as geometries
from rotationzoo.model import loading
from rotationzoo.model.capture import capture, check_transparent, decoder
from rotationzoo.model.geometry import geometry_of, geometry_on_meta
from rotationzoo.recipe import Recipe

TABLE = ROOT / "docs" / "architectures.md"
IDS = torch.randint(3, 59, (2, 24), generator=torch.Generator().manual_seed(1))


@families()
def test_looking_on_meta_agrees_with_the_real_model(name):
    meta = loading.on_meta(architectures.config(name), name)
    if refusal := EXPECTED[name].refusal:
        with pytest.raises(UnsupportedModel, match=refusal):
            geometry_on_meta(meta)
        model = architectures.build(name)
        with pytest.raises(UnsupportedModel, match=refusal):
            geometry_of(model)
        with torch.no_grad():  # those without the attention interface are left as they are
            check_transparent(model, IDS)
        return
    geometry = geometry_on_meta(meta)
    assert geometry == geometry_of(architectures.build(name))
    assert tuple(layer.index for layer in cached_layers(geometry)) == EXPECTED[name].layers


@families(CALIBRATED)
def test_capture_sees_every_layer_and_is_undone(name):
    model = architectures.build(name)
    plain = read_whole(model, IDS)
    seen = {}
    with capture(model, lambda layer, *tensors: seen.update({layer: [t.shape for t in tensors]})):
        captured = read_whole(model, IDS)
    assert torch.equal(plain, captured)
    assert torch.equal(plain, read_whole(model, IDS)), "not restored"
    geometry = geometry_of(model)
    assert sorted(seen) == [layer.index for layer in geometry]
    for layer in geometry:
        query, key, value, output = seen[layer.index]
        if layer.rope_dim is not None:  # `test_latent` compares captured latents
            sizes = layer.kv_heads, layer.key_dim, layer.value_dim, layer.rope_dim
            assert sizes == (1, 20, 20, 8)
            assert query == key == (2, layer.query_heads, 24, 16 + 8)
            assert value == output == (2, layer.query_heads, 24, 12)
            continue
        assert query == (2, layer.query_heads, 24, layer.key_dim)
        assert key == (2, layer.kv_heads, 24, layer.key_dim)
        assert value == (2, layer.kv_heads, 24, layer.value_dim)
        assert output == (2, layer.query_heads, 24, layer.value_dim)
    statistics = statistics_tensors(average(collect(model, geometry, [IDS], Recipe(sink=4))))
    assert all(torch.isfinite(tensor).all() for tensor in statistics.values())


def _named(layers: Iterable[int]) -> str:
    """Layers of a small model, in words."""
    numbers = list(layers)
    if len(numbers) == architectures.LAYERS:
        return "all"
    return ", ".join(map(str, numbers))


@pytest.mark.thorough
def test_the_table_in_the_docs_is_what_the_probe_finds(request):
    """`pytest tests/model/test_capture.py --write-docs` writes it into docs/architectures.md."""
    rows = []
    for name in filter(architectures.available, NAMES):
        model = architectures.build(name)
        try:
            geometry = geometry_of(model)
            check_transparent(model, IDS)
        except RotationZooError as error:
            rows.append(f"| {name} | refused: {error} |")
            continue
        layers = cached_layers(geometry)
        what = _named(layer.index for layer in layers)
        if len(geometry) > len(layers):
            sharing = [layer.index for layer in geometry if layer.owner != layer.index]
            what += f"; {_named(sharing)} share their caches"
        dims = sorted({(layer.key_dim, layer.value_dim) for layer in layers})
        if len(dims) > 1:
            what += f"; head dimensions {', '.join(str(key) for key, _ in dims)}"
        if any(key != value for key, value in dims):
            what += f"; keys of {dims[0][0]} and values of {dims[0][1]}"
        if layers[0].rope_dim is not None:
            what += f"; latents of {layers[0].key_dim}"
            what += f", and keys with RoPE of {layers[0].rope_dim}"
        if moved := shifted_layers(geometry):
            what += f"; keys keep their mean ({_named(moved)})"
        rows.append(f"| {name} | {what} |")
    text = TABLE.read_text(encoding="utf-8")
    head, _ = text.split("| architecture |")
    body = "| architecture | layers that are calibrated |\n|---|---|\n" + "\n".join(rows) + "\n"
    if len(rows) < len(NAMES) or architectures.CACHES_HEADS:
        pytest.skip("this transformers lacks some of the architectures")
    if architectures.IS_OLD:
        # It lacks some of the architectures, and refuses GPT-J.
        differing = set(rows) - set(text.splitlines())
        assert [row.split(" | ")[0] for row in differing] in ([], ["| gptj"])
    elif request.config.getoption("--write-docs"):
        TABLE.write_text(head + body, encoding="utf-8")
    else:
        assert text == head + body, "run this test with --write-docs"


def test_restored_when_the_forward_raises():
    model = architectures.build("gemma2")  # eager: in no registry before, and in none after
    plain = read_whole(model, IDS)

    def fail(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), capture(model, fail):
        read_whole(model, IDS)
    assert torch.equal(plain, read_whole(model, IDS))


def test_other_models_and_towers_are_left_alone():
    model, other = architectures.build("qwen3"), architectures.build("llama")
    with capture(model, lambda *_: pytest.fail("captured another model")):
        read_whole(other, IDS)
    vlm = architectures.build("gemma3-vlm")
    layers = []
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with capture(vlm, lambda layer, *_: layers.append(layer)), torch.no_grad():
        vlm.model.vision_tower(pixel_values=pixels)
        assert layers == []
        read_whole(vlm, IDS)
    assert layers == [0, 1, 2, 3]


def test_a_capture_that_changes_the_model_is_refused():
    model = architectures.build("qwen3")
    norm = decoder(model).norm
    state = {"calls": 0}

    def drift(module, args, output):
        state["calls"] += 1
        # The second forward, the captured one, differs.
        return 2 * output if state["calls"] == 2 else output

    norm.register_forward_hook(drift)
    with pytest.raises(UnsupportedModel, match="changes what"), torch.no_grad():
        check_transparent(model, IDS)


MAMBA = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=4, mamba_d_state=8,
)  # fmt: skip
TYPES = ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"]
ZAMBA2 = dict(
    MAMBA, layer_types=TYPES, hybrid_layer_ids=[2, 4], mamba_headdim=16, n_mamba_heads=8
)  # fmt: skip
ZAMBA = MAMBA | {"attn_layer_period": 3, "attn_layer_offset": 2, "n_mamba_heads": 2}
SHARES = "^{}ForCausalLM shares attention among"


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        # Differential attention reads its values in two halves, which are not stored.
        ("DiffLlama", architectures.BASE, "more than once in a layer"),
        ("Mamba", dict(hidden_size=32, num_hidden_layers=2, vocab_size=64), "its own code"),
        ("Bert", dict(architectures.BASE, is_decoder=False), "encoder"),
        ("ViT", {}, "not a causal language model"),
        ("Zamba2", ZAMBA2 | {"num_mem_blocks": 1}, SHARES),
        ("Zamba2", ZAMBA2 | {"num_mem_blocks": 2}, SHARES),
        ("Zamba", ZAMBA, SHARES),
    ],
)
def test_what_has_no_cache_that_a_rotation_fits_is_refused(family, options, says):
    config = getattr(transformers, f"{family}Config")(**options)
    with pytest.raises(UnsupportedModel, match=says.format(family)):
        geometry_on_meta(loading.on_meta(config, family))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_heads_that_are_repeated_after_the_cache_are_counted(kv_heads):
    """Mixtures of attention, with several experts for the cached keys and values."""
    options = dict(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_key_value_heads=kv_heads,
        kv_channels=16, intermediate_size=64, num_local_experts=4,
    )  # fmt: skip
    model = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**options)).eval()
    says = f"caches {kv_heads} heads of keys and values, .* makes {2 * kv_heads}"
    with pytest.raises(UnsupportedModel, match=says):
        geometry_of(model)


@pytest.mark.parametrize(
    ("name", "options"),
    [("longcat_flash", {}), ("llama4", {"num_local_experts": 4}), ("minimax_m2", {})],
)
def test_experts_that_need_values_do_not_hide_the_layers(name, options, monkeypatch, caplog):
    """The experts of LongCat call `nonzero`, and the others do here."""
    config = architectures.config(name, **options)
    expected = geometry_of(architectures.build(name, **options))
    model = loading.on_meta(config, name)
    for path, module in model.named_modules():
        if path.endswith("experts") and name != "longcat_flash":
            plain = module.forward
            module.forward = lambda *given, plain=plain: plain(*given)[given[0].sum(1).nonzero()]
    geometries._say_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("rotationzoo"), "propagate", True)
    assert geometry_on_meta(model) == expected
    assert f"experts of {type(model).__name__} need values: its layers are read" in caplog.text


def test_attention_that_needs_values_is_left_to_the_weights():
    model = loading.on_meta(architectures.config("llama"), "llama")
    model.model.layers[1].self_attn.k_proj.forward = lambda rows: rows[rows.sum(-1) > 0]
    assert geometry_on_meta(model) is None


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("own", ["keys", "values"])
def test_shared_keys_with_values_of_their_own_are_no_shared_cache(own, meta):
    """No cache stores these rows, and a rotation of the owner's rows would not fit them."""

    def replace_rows(module, args, options):
        key, value = options["shared_kv_states"][module.layer_type]
        rows = (key + 1, value) if own == "keys" else (key, value + 1)
        return args, options | {"shared_kv_states": {module.layer_type: rows}}

    model = architectures.build("gemma4")
    model = loading.on_meta(model.config, "gemma4") if meta else model
    attention = decoder(model).layers[3].self_attn
    attention.register_forward_pre_hook(replace_rows, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=r"layer 3 .* keys and values that no cache layer"):
        geometry_of(model)
