"""The ONNX Runtime engine (pull request 31726): a model fragment to copy attention nodes from.

The nodes are of the operator `com.microsoft.MixedPrecisionGroupQueryAttention`. Rotations are
constant initializers `(H_kv, D, D)`, inputs 18 and 19 of each node, applied as `x @ R`.
"""

import json
from pathlib import Path
from typing import Any

import torch

from rotationzoo.engines.base import (
    Capabilities,
    Description,
    Launch,
    Options,
    Payload,
    SideMatrices,
)
from rotationzoo.engines.formats.reading import PAGE, check_equal_dims
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import Layer, cached_layers

CAPABILITIES = Capabilities(heads=True, mean=False, clip="layer", windows=True)
DESCRIPTION = Description(
    cache="[onnxruntime pull request 31726](https://github.com/microsoft/onnxruntime/pull/31726), "
    "CPU",
    reads="initializers `(H_kv, D, D)` of `MixedPrecisionGroupQueryAttention`",
    limits="no exact tokens at all; keys and values of different dimensions; "
    "caches shared between layers",
)
FRAGMENT, ATTRIBUTES = "rotations.onnx", "attributes.json"
OPERATOR, DOMAIN = "MixedPrecisionGroupQueryAttention", "com.microsoft"
_CACHE = ("past_key", "past_value")
_WINDOWS = ("past_hp_key", "past_hp_value")
_SHARED_INPUTS = ("seqlens_k", "total_sequence_length")  # the same for all nodes
_UNUSED_INPUTS = 9  # optional inputs between the shared ones and the windows
_Shape = tuple[str, list[Any]]
"""An ONNX element type and the dimensions. A dimension given as a word may be any number."""


def check_payload(payload: Payload) -> None:
    """Raise `RotationZooError` for what the operator rejects, or if `onnx` is not installed."""
    if payload.model is None:
        raise RotationZooError(
            "ONNX Runtime wants one rotation for each KV head, and these files do not say how many "
            "there are",
            hint="name their model: rotationzoo import FILES --model MODEL",
        )
    check_equal_dims("ONNX Runtime", payload)
    if any(layer.owner != layer.index for layer in payload.geometry):
        raise RotationZooError(
            "ONNX Runtime's operator cannot read the cache of another layer", hint=PAGE
        )
    if payload.sink == payload.recent == 0:
        raise RotationZooError(
            "ONNX Runtime rejects rotations where no token is kept exact",
            hint="add: --windows 64/256",
        )
    # The package is optional, so it is imported only here and where it is used.
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise RotationZooError(
            "onnx is not installed",
            hint="run: pip install 'onnx>=1.18'",
        ) from error


def write_files(work: Path, final: Path, payload: Payload, options: Options) -> Launch:
    """Write a model with one attention node per layer and its rotations.

    The nodes' attributes are also written as JSON.
    """
    import onnx

    attributes = {
        str(layer.index): _attributes(layer, payload) for layer in cached_layers(payload.geometry)
    }
    onnx.save(_model(payload, attributes), str(work / FRAGMENT))
    content = {
        "operator": f"{DOMAIN}.{OPERATOR}",
        "inputs": {"18": "oscar_rotation_k", "19": "oscar_rotation_v"},
        "layers": attributes,
    }
    text = json.dumps(content, indent=2) + "\n"
    (work / ATTRIBUTES).write_text(text, encoding="utf-8")
    notes = [
        "needs an ONNX Runtime with pull request 31726, on a CPU",
        "it may round halves to even, which no codec here does",
    ]
    if payload.value is None:
        notes.append("the nodes have no value rotation: the weights carry it")
    command = (
        "# replace each GroupQueryAttention node by the one of its layer in "
        f"{final / FRAGMENT}, weights by initializers"
    )
    return Launch([command], {}, notes)


def _model(payload: Payload, attributes: dict[str, dict[str, Any]]) -> Any:
    """An ONNX model of attention nodes, which are not connected to each other."""
    from onnx import helper, numpy_helper

    nodes, initializers = [], []
    shapes: dict[str, _Shape] = {}
    for layer in cached_layers(payload.geometry):
        prefix = f"layers.{layer.index}."
        rotations = {prefix + "oscar_rotation_k": payload.key}
        if payload.value is not None:
            rotations[prefix + "oscar_rotation_v"] = payload.value
        for name, side in rotations.items():
            matrices = _matrix_per_head(side, layer).numpy()
            initializers.append(numpy_helper.from_array(matrices, name))
        node_inputs = _node_inputs(prefix, list(rotations))
        node_attributes = attributes[str(layer.index)]
        named = {"name": prefix + "attention", "domain": DOMAIN, **node_attributes}
        nodes.append(helper.make_node(OPERATOR, node_inputs, _node_outputs(prefix), **named))
        shapes |= _shapes(layer, prefix, payload, node_attributes)
    inputs: list[Any] = []
    outputs: list[Any] = []
    for name, shape in shapes.items():
        is_output = "present" in name or name.endswith("output")
        direction = outputs if is_output else inputs
        direction.append(_value_info(name, shape))
    graph = helper.make_graph(nodes, "rotations", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        graph, opset_imports=opsets, ir_version=10, producer_name="rotationzoo"
    )
    provenance = {f"rotationzoo.{key}": str(value) for key, value in payload.provenance.items()}
    helper.set_model_props(model, provenance)
    return model


def _node_inputs(prefix: str, rotations: list[str]) -> list[str]:
    """A node's inputs in the operator's order, with the rotations as inputs 18 and 19."""
    tensors = [prefix + name for name in ("query", "key", "value", *_CACHE)]
    windows = [prefix + name for name in _WINDOWS]
    return [*tensors, *_SHARED_INPUTS, *[""] * _UNUSED_INPUTS, *windows, *rotations]


def _node_outputs(prefix: str) -> list[str]:
    cache = [prefix + name for name in ("output", "present_key", "present_value")]
    return [*cache, "", prefix + "present_hp_key", prefix + "present_hp_value"]


def _matrix_per_head(side: SideMatrices, layer: Layer) -> torch.Tensor:
    """A layer's rotations `(H_kv, D, D)`. A shared rotation is repeated for every KV head."""
    matrix = side.rotation[layer.index]
    if matrix.ndim == 2:
        matrix = matrix.expand(layer.kv_heads, -1, -1)
    return matrix.contiguous()


def _attributes(layer: Layer, payload: Payload) -> dict[str, Any]:
    key_clip, value_clip = payload.clips[layer.index]
    return {
        "num_heads": layer.query_heads,
        "kv_num_heads": layer.kv_heads,
        "kv_quant_group_size": payload.group_size or 0,  # 0 means the whole head
        "k_quant_rho": key_clip,
        "v_quant_rho": value_clip,
        "metadata_type": "fp32",
        "sink_size": payload.sink,
        "recent_size": payload.recent,
        "cache_format_version": 1,
    }


def _shapes(
    layer: Layer, prefix: str, payload: Payload, attributes: dict[str, Any]
) -> dict[str, _Shape]:
    """Name -> type and shape, for a node's inputs and outputs and the shared inputs."""
    dim, heads = layer.key_dim, layer.kv_heads
    groups = dim // (attributes["kv_quant_group_size"] or dim)
    packed = dim // 4 + groups * 8  # bytes per row: 4 codes a byte, 8 bytes of metadata a group
    window = payload.sink + payload.recent
    shapes: dict[str, _Shape] = {
        "query": ("FLOAT", ["batch", "tokens", layer.query_heads * dim]),
        "key": ("FLOAT", ["batch", "tokens", heads * dim]),
        "value": ("FLOAT", ["batch", "tokens", heads * dim]),
        "output": ("FLOAT", ["batch", "tokens", layer.query_heads * dim]),
    }
    for name in _CACHE:
        shapes[name] = "UINT8", ["batch", heads, "past", packed]
        shapes[name.replace("past", "present")] = "UINT8", ["batch", heads, "present", packed]
    for name in _WINDOWS:
        shapes[name] = "FLOAT", ["batch", heads, "past_window", dim]
        shapes[name.replace("past", "present")] = "FLOAT", ["batch", heads, window, dim]
    of_node = {prefix + name: shape for name, shape in shapes.items()}
    lengths, total = _SHARED_INPUTS
    shared: dict[str, _Shape] = {lengths: ("INT32", ["batch"]), total: ("INT32", [1])}
    return of_node | shared


def _value_info(name: str, shape: _Shape) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, getattr(TensorProto, shape[0]), shape[1])
