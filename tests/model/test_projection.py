"""The output projections that equalizers are made from: read wherever the weight is, and however
it is kept."""

import accelerate
import pytest
import torch
from support import architectures
from transformers.integrations.finegrained_fp8 import FP8Linear

from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.projection import output_projections


def read_all(model, geometry) -> dict[int, tuple[torch.Tensor | None, str]]:
    projections = output_projections(model, geometry)
    return {layer: projection.read() for layer, projection in projections.items()}


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_output_projection_is_found_by_what_runs(name):
    model = architectures.build(name)
    geometry = geometry_of(model)
    matrices = read_all(model, geometry)
    assert set(matrices) == {layer.index for layer in geometry}
    for layer in geometry:
        weight = model.get_decoder().layers[layer.index].self_attn.o_proj.weight
        matrix, kept = matrices[layer.index]
        assert matrix.shape == (layer.query_heads, layer.value_dim, 64)
        assert torch.equal(matrix.flatten(0, 1).T, weight)
        assert kept == "weight"


# ---- weights that are elsewhere until their module runs


@pytest.mark.parametrize("place", ["memory", "disk", "module by module"])
def test_offloaded_weights_are_read_and_then_let_go(place, tmp_path):
    plain = architectures.build("llama")
    geometry = geometry_of(plain)
    expected = read_all(plain, geometry)
    model = architectures.build("llama")
    if place == "memory":
        accelerate.cpu_offload(model, execution_device="cpu")
    elif place == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    else:
        modules = {f"model.layers.{layer}.self_attn.o_proj": "disk" for layer in range(4)}
        owned = {name.rpartition(".")[0]: "cpu" for name, _ in model.named_parameters()}
        accelerate.dispatch_model(
            model, owned | modules, main_device="cpu", offload_dir=tmp_path, force_hooks=True
        )
    weights = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    assert all(weight.is_meta for weight in weights)
    matrices = read_all(model, geometry)
    for layer, (matrix, kept) in expected.items():
        assert kept == matrices[layer][1] == "weight"
        assert torch.equal(matrices[layer][0], matrix)
    assert all(layer.self_attn.o_proj.weight.is_meta for layer in model.model.layers)


# ---- weights in FP8


def blocks_of(count: int, block: int) -> torch.Tensor:
    return torch.arange(count) // block


@pytest.mark.parametrize(
    "name", ["blocks", "cut blocks", "one scale", "rows", "row vector", "powers of two"]
)
def test_fp8_weights_are_multiplied_with_their_scales(name):
    """Blocks and single scales in transformers' own module; rows as its FBGEMM module and
    compressed-tensors keep them."""
    model = architectures.build("llama")
    geometry = geometry_of(model)
    generator = torch.Generator().manual_seed(0)
    exact = {}
    for index, layer in enumerate(model.model.layers):
        weight = torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn)
        sizes = {"blocks": (16, 32), "powers of two": (16, 32), "cut blocks": (24, 40)}.get(name)
        module = FP8Linear(64, 64, block_size=sizes)
        if sizes:
            grid = [-(-64 // size) for size in sizes]
            scale = torch.rand(grid, generator=generator) + 0.1
            if name == "powers of two":
                scale = scale.to(torch.float8_e8m0fnu)
            whole = scale.float()[blocks_of(64, sizes[0])][:, blocks_of(64, sizes[1])]
        else:
            shape = {"one scale": [], "row vector": [64], "rows": [64, 1]}[name]
            scale = torch.rand(shape, generator=generator)
            whole = (scale[:, None] if name == "row vector" else scale).expand(64, 64)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        if sizes or name == "one scale":
            module.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
        else:
            del module.weight_scale_inv
            module.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        exact[index] = weight.double() * whole.double()
        # Its own kernels are a GPU's.
        module.forward = lambda rows, index=index: rows @ exact[index].float().T
        layer.self_attn.o_proj = module
    for layer, (matrix, kept) in read_all(model, geometry).items():
        assert kept == "dequantized"
        assert torch.allclose(matrix.flatten(0, 1).T.double(), exact[layer], rtol=1e-6)


# ---- what cannot be read


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.weight.data.char(), "identity: its weights are kept as int8"),
        (
            lambda m: m.weight.data.to(torch.float8_e4m3fn),
            "identity: its float8_e4m3fn weights have no scale",
        ),
    ],
)
def test_what_is_not_read_says_why(change, says):
    model = architectures.build("llama")
    module = model.model.layers[2].self_attn.o_proj
    weight = module.weight

    def multiply(rows):
        if rows.dtype != weight.dtype:
            raise RuntimeError("a kernel for another type")
        return rows @ weight.T

    module.forward = multiply
    module.weight = torch.nn.Parameter(change(module), requires_grad=False)
    matrices = read_all(model, geometry_of(model))
    assert matrices[2] == (None, says)
    assert matrices[1][1] == "weight"


@pytest.mark.hostile("values")
def test_a_projection_that_is_not_finite_names_its_layer():
    model = architectures.build("llama")
    geometry = geometry_of(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, 3] = float("nan")
    with pytest.raises(RotationZooError, match="output projection of layer 1 is not finite"):
        read_all(model, geometry)
