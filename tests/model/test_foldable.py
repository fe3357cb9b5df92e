"""What may scale the keys of a model is found by tracing, and what undoes a factor is seen."""

import pytest
import torch
import transformers
from support.architectures import BASE

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.key_scales import check_values, find_key_scales, with_equalizing

HALVES = [[channel, channel + 8] for channel in range(8)]


def on_meta(kind: str, **changes):
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **changes})
    return loading.on_meta(config, "this")


def scales(model):
    return find_key_scales(model, geometry_on_meta(model), "this")


def groups(classes: torch.Tensor) -> list[list[int]]:
    """Channels of one head `[D]` that have the same factor."""
    return sorted((classes == number).nonzero().flatten().tolist() for number in classes.unique())


def changed(model, factors=None) -> dict[str, tuple[torch.Tensor, float]]:
    """Parameter of layer 0 -> its factors and offset, when its keys are multiplied by 4, or by
    `factors`."""
    found = scales(model)
    wanted = {layer: torch.ones(classes.shape) for layer, classes in found.classes.items()}
    wanted[0] = 4 * wanted[0] if factors is None else factors
    return {
        f"{scaling.weight.module}.{scaling.weight.name}": (scaling.factors, scaling.offset)
        for scaling in found.scalings(wanted)
    }


@pytest.mark.parametrize(
    ("model", "pairs", "heads_share"),
    [
        ("Llama", HALVES, False),
        ("Qwen2", HALVES, False),
        ("Qwen3", HALVES, True),
        ("Olmo2", HALVES, False),  # one norm over the whole width
        ("Cohere", [[channel, channel + 1] for channel in range(0, 16, 2)], False),
        # Partial: RoPE turns the first 4 of 16 channels, in halves.
        ("Glm4Moe", None, True),
        ("Persimmon", None, True),  # LayerNorm, with a bias
        ("StableLm", [[0, 2], [1, 3], *([channel] for channel in range(4, 16))], False),
    ],
)
def test_channels_that_must_have_the_same_factor(model, pairs, heads_share):
    classes = scales(on_meta(model, **OPTIONS.get(model, {}))).classes[1]
    assert classes.shape == (4 if model == "Persimmon" else 2, 16)
    if pairs is not None:
        assert groups(classes[0]) == sorted(pairs)
    assert torch.equal(classes[0], classes[1]) == heads_share


OPTIONS = {
    "Qwen3": {"head_dim": 16},
    "StableLm": {"partial_rotary_factor": 0.25},
    "Glm4Moe": {"head_dim": 16, "use_qk_norm": True},
}


def test_rows_of_projections_are_scaled_where_there_is_no_norm():
    found = changed(on_meta("Llama"))
    attention = "model.layers.0.self_attn"
    assert found.keys() == {f"{attention}.k_proj.weight", f"{attention}.q_proj.weight"}
    assert (found[f"{attention}.k_proj.weight"][0] == 4).all()
    assert (found[f"{attention}.q_proj.weight"][0] == 0.25).all()


def test_all_query_heads_of_a_group_are_divided():
    factors = torch.ones(2, 16)
    factors[1, 3] = factors[1, 11] = 8
    found = changed(on_meta("Llama"), factors)
    query = found["model.layers.0.self_attn.q_proj.weight"][0].view(4, 16)
    assert (query[:2] == 1).all()
    assert (query[2:, [3, 11]] == 1 / 8).all()
    assert (query[2:] != 1).sum() == 4


def test_rows_of_a_fused_projection_are_scaled():
    ((name, (factors, _)),) = changed(on_meta("Phi3")).items()
    assert name == "model.layers.0.self_attn.qkv_proj.weight"
    queries, keys, values = factors.split([64, 32, 32])
    assert (queries == 0.25).all()
    assert (keys == 4).all()
    assert (values == 1).all()


@pytest.mark.parametrize(("model", "offset"), [("Qwen3", 0.0), ("Gemma3Text", 1.0)])
def test_the_weight_of_a_norm_is_scaled_where_there_is_one(model, offset):
    model = on_meta(model, head_dim=16)
    found = changed(model)
    attention = "model.layers.0.self_attn"
    assert found.keys() == {f"{attention}.k_norm.weight", f"{attention}.q_norm.weight"}
    assert {tuple(factors.tolist()) for factors, _ in found.values()} == {(4.0,) * 16, (0.25,) * 16}
    assert {offset for _, offset in found.values()} == {offset}


def test_norms_in_one_operation():
    model = on_meta("Qwen3", head_dim=16)
    for layer in model.model.layers:
        layer.self_attn.k_norm = torch.nn.RMSNorm(16, device="meta")
        layer.self_attn.q_norm = torch.nn.LayerNorm(16, device="meta")
    found = changed(model)
    attention = "model.layers.0.self_attn"
    norms = ("k_norm.weight", "q_norm.weight", "q_norm.bias")
    assert found.keys() == {f"{attention}.{norm}" for norm in norms}
    assert (found[f"{attention}.q_norm.bias"][0] == 0.25).all()


def test_channels_that_share_a_weight_must_have_the_same_factor():
    with pytest.raises(UnsupportedModel, match="factors of layer 0 differ between channels"):
        changed(on_meta("Llama"), torch.arange(1.0, 33).view(2, 16))
    uneven = torch.ones(2, 16)
    uneven[1] = 2
    assert changed(on_meta("Llama"), uneven)
    with pytest.raises(UnsupportedModel, match="factors of layer 0 differ between channels"):
        changed(on_meta("Qwen3", head_dim=16), uneven)


def test_all_tokens_must_have_the_same_factors():
    """The first token has its channels in another order, which no single factor may tell apart."""
    model = on_meta("Llama")
    model.model.layers[1].self_attn.k_proj.register_forward_hook(
        lambda module, args, output: torch.cat([output[:, :1].flip(-1), output[:, 1:]], 1)
    )
    first, second = scales(model).classes[1]
    assert torch.equal(first, second.flip(0))


def test_all_readers_of_a_shared_cache_are_divided():
    """Layers 2 and 3 of this Gemma read the caches of layers 0 and 1."""
    model = on_meta(
        "Gemma4Text", head_dim=16, global_head_dim=16, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8,
    )  # fmt: skip
    assert [layer.owner for layer in geometry_on_meta(model)] == [0, 1, 0, 1]
    assert changed(model).keys() == {
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.2.self_attn.q_norm.weight",
    }


def attention_of(model, layer: int = 1):
    return model.model.layers[layer].self_attn


def without_weight():
    model = on_meta("Qwen3", head_dim=16)
    attention_of(model).k_norm.forward = lambda states: torch.nn.functional.normalize(
        states, dim=-1
    )
    return model


def clamped():
    return on_meta("Olmo", clip_qkv=8.0)


def read_elsewhere():
    model = on_meta("Llama")
    attention_of(model).k_proj.register_forward_hook(
        lambda module, args, output: output + output.mean()
    )
    return model


def rounded():
    model = on_meta("Llama")
    attention_of(model).k_proj.register_forward_hook(
        lambda module, args, output: output + output.int()
    )
    return model


def bits():
    model = on_meta("Llama")
    attention_of(model).k_proj.register_forward_hook(
        lambda module, args, output: output + output.view(torch.int32)
    )
    return model


def tied_to_queries():
    model = on_meta("Qwen3", head_dim=16)
    attention_of(model).q_norm = attention_of(model).k_norm
    return model


def tied_layers():
    model = on_meta("Llama")
    attention_of(model, 2).k_proj = attention_of(model, 1).k_proj
    return model


def tied_to_another_module():
    model = on_meta("Llama")
    model.extra = torch.nn.Linear(64, 32, bias=False, device="meta")
    model.extra.weight = attention_of(model).k_proj.weight  # which does not run
    return model


def transposed_use():
    model = on_meta("Llama")
    attention_of(model).k_proj.register_forward_hook(
        lambda module, args, output: output @ module.weight[:, :32]
    )
    return model


def two_offsets():
    model = on_meta("Gemma3Text", head_dim=16)
    norm = attention_of(model).k_norm
    norm.register_forward_hook(lambda module, args, output: args[0] * module.weight)
    return model


def keys_are_values():
    model = on_meta("Llama")
    attention = attention_of(model)
    attention.v_proj = torch.nn.Identity()
    attention.k_proj.register_forward_hook(
        lambda module, args, output: vars(attention.v_proj).update(forward=lambda _: output)
    )
    return model


def unknown_keys():
    model = on_meta("Llama")
    attention_of(model).k_proj.forward = lambda states: states.new_ones(1, states.shape[1], 32)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (without_weight, "layer 1 .* exactly: aten.linalg_vector_norm.default in model.layers.1"),
        (clamped, "layer 0 .* exactly: aten.clamp_.default in model.layers.0.self_attn"),
        (read_elsewhere, "layer 1 .* exactly: aten.mean.default in model.layers.1"),
        (rounded, "layer 1 .* exactly: aten._to_copy.default in model.layers.1"),
        (bits, "layer 1 .* exactly: aten.view.dtype in model.layers.1"),
        (tied_to_queries, "layer 1 .* exactly: its queries or another layer use the same weights"),
        (tied_layers, "layer 1 .* exactly: its weights are shared by modules"),
        (tied_to_another_module, "layer 1 .* exactly: its weights are shared by modules"),
        (transposed_use, "layer 1 .* of its weight in model.layers.1.self_attn.k_proj"),
        (keys_are_values, "layer 1 .* exactly: its values use the same weight"),
        (two_offsets, "layer 1 .* exactly: another aten.mul.Tensor of its weight in"),
        (unknown_keys, "layer 1 .* no weight of a projection or a norm makes them"),
    ],
)
def test_what_undoes_or_reads_a_factor_is_seen(build, reason):
    model = build()
    with pytest.raises(UnsupportedModel, match=reason):
        scales(model)


def test_keys_and_values_are_told_apart():
    model = on_meta("Llama")
    geometry = geometry_on_meta(model)
    assert not any(layer.fixed_values for layer in with_equalizing(model, geometry))
    attention_of(model).v_proj.register_forward_hook(lambda module, args, output: output.exp())
    reason = check_values(model, geometry)
    assert reason.startswith("layer 1 of the model has a norm or another operation between")
    assert all(layer.fixed_values for layer in with_equalizing(model, geometry))
    with pytest.raises(UnsupportedModel, match="layer 1 of the model has keys that cannot be"):
        with_equalizing(unknown_keys(), geometry)


def test_the_look_leaves_the_library_and_the_model_as_they_were():
    before = transformers.Cache.update, torch.nn.Linear.forward
    model = on_meta("Llama")
    scales(model)
    assert before == (transformers.Cache.update, torch.nn.Linear.forward)
    assert not any(module._forward_pre_hooks for module in model.modules())
