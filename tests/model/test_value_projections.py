"""Which modules carry a layer's values, and what else reads them: every such model is refused."""

from dataclasses import replace

import pytest
import torch
import transformers
from support.architectures import BASE

from rotationzoo.errors import UnsupportedModel
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.value_projections import find_projections


def projections(model) -> list[tuple[str, str]]:
    return find_projections(model, geometry_on_meta(model), "this")


def on_meta(kind: str, **changes):
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **changes})
    return loading.on_meta(config, "this")


class Again(torch.nn.Module):
    """Hands on what another module made last."""

    def __init__(self, other: torch.nn.Module):
        super().__init__()
        other.register_forward_hook(lambda module, args, output: vars(self).update(made=output))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.made


def tie_modules(layers):
    layers[2].self_attn.v_proj = layers[1].self_attn.v_proj


def tie_weights(layers):
    layers[1].self_attn.o_proj.weight = layers[0].self_attn.q_proj.weight


def take_keys_for_values(layers):
    layers[1].self_attn.v_proj = Again(layers[1].self_attn.k_proj)


def take_values_of_another_layer(layers):
    layers[3].self_attn.v_proj = Again(layers[1].self_attn.v_proj)


def mix_heads(layers):
    layers[1].self_attn.v_proj.register_forward_hook(
        lambda module, args, output: output.unflatten(-1, (16, 2)).mT
    )


def read_outputs_twice(layers):
    layers[1].self_attn.o_proj.register_forward_hook(
        lambda module, args, output: output + args[0].mean()
    )


class EachHead(torch.nn.Linear):
    """One output projection for every head."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states.unflatten(-1, (4, 16))).sum(2)


def project_every_head(layers):
    layers[1].self_attn.o_proj = EachHead(16, 64, bias=False, device="meta")


def test_models_without_trouble_are_absorbed():
    expected = ("model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj")
    assert projections(on_meta("Olmo"))[1] == projections(on_meta("Llama"))[1] == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (tie_modules, "a value or output projection that it shares"),
        (tie_weights, "a value or output projection that it shares"),
        (take_keys_for_values, "a fused value projection, model.layers.1.self_attn.k_proj"),
        (take_values_of_another_layer, "another use of its values .* in the attention of layer 3"),
        (mix_heads, "another use of its values than its attention, in their order"),
        (read_outputs_twice, "a gate or a norm .* projection, aten.mean.default, model.layers.1"),
        (project_every_head, "a gate or a norm between attention and the output projection"),
    ],
)
def test_what_else_reads_the_values_is_seen(change, reason, monkeypatch):
    """Each of these has the modules and shapes of a model that can absorb a rotation."""
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.apply_rotary_pos_emb",
        lambda query, key, *_: (query, key),
    )
    model = on_meta("Llama")
    change(model.model.layers)
    with pytest.raises(UnsupportedModel, match=f"layer 1 of this has {reason}"):
        projections(model)


def test_a_layer_that_reads_the_cache_of_another_is_refused():
    model = on_meta("Llama")
    first, second, *_ = geometry_on_meta(model)
    with pytest.raises(
        UnsupportedModel, match="layer 1 of this has no value projection of its own"
    ):
        find_projections(model, [first, replace(second, owner=0)], "this")


def test_the_look_leaves_the_library_as_it_was():
    before = transformers.Cache.update, torch.nn.Linear.forward
    use = "layer 0 of this has another use of its values than its attention, in aten.clamp_.default"
    with pytest.raises(UnsupportedModel, match=use):
        projections(on_meta("Olmo", clip_qkv=8.0))  # in place
    assert before == (transformers.Cache.update, torch.nn.Linear.forward)
