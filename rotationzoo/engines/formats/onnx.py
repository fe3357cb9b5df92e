"""ONNX Runtime's `com.microsoft.MixedPrecisionGroupQueryAttention` of pull request 31726: a
fragment to copy nodes from.

Its rotations are constant initializers `(H_kv, D, D)`, inputs 18 and 19 of each attention node,
applied as `x @ R`.
"""

import json
from pathlib import Path
from typing import Any

import torch

from rotationzoo.engines.base import OTHERS, Capabilities, Launch, Options, Payload, Side, one_dim
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import Geometry, Layer, cached_layers

NAME = "onnx"
CAPABILITIES = Capabilities(heads=True, mean=False, clip="layer", windows=True)
FRAGMENT, ATTRIBUTES = "rotations.onnx", "attributes.json"
OPERATOR, DOMAIN = "MixedPrecisionGroupQueryAttention", "com.microsoft"
_CACHE = ("past_key", "past_value")
_WINDOWS = ("past_hp_key", "past_hp_value")


def check(geometry: Geometry, serving: Payload) -> None:
    """Raise `RotationZooError` for what the operator rejects."""
    if serving.model is None:
        raise RotationZooError(
            "ONNX Runtime wants one rotation for each KV head, and these files do not say how many there are",
            hint="name their model: rotationzoo import FILES --model MODEL",
        )
    one_dim("ONNX Runtime", geometry)
    if any(layer.owner != layer.index for layer in geometry):
        raise RotationZooError(
            "ONNX Runtime's operator cannot read the cache of another layer", hint=OTHERS
        )
    if serving.sink == serving.recent == 0:
        raise RotationZooError(
            "ONNX Runtime rejects rotations where no token is kept exact",
            hint="add: --windows 64/256",
        )
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise RotationZooError(
            "onnx is not installed",
            hint="run: pip install 'rotationzoo[engines]', or pip install onnx",
        ) from error


def write(work: Path, final: Path, serving: Payload, options: Options) -> Launch:
    """Write a model of one attention node a layer with its rotations, and the nodes' attributes as
    JSON."""
    import onnx
    from onnx import helper, numpy_helper

    layers = cached_layers(serving.geometry)
    nodes, initializers = [], []
    values: dict[str, tuple[str, list[Any]]] = {}
    attributes = {str(layer.index): _attributes(layer, serving) for layer in layers}
    for layer in layers:
        names = {}
        for letter, side in (("k", serving.key), ("v", serving.value)):
            if side is not None:
                names[letter] = f"layers.{layer.index}.oscar_rotation_{letter}"
                tiled = tile(side, layer).numpy()
                initializers.append(numpy_helper.from_array(tiled, names[letter]))
        prefix = f"layers.{layer.index}."
        inputs = [prefix + name for name in ("query", "key", "value", *_CACHE)] + [
            "seqlens_k",
            "total_sequence_length",
        ]
        inputs += (
            [""] * 9
            + [prefix + name for name in _WINDOWS]
            + [names["k"], *([names["v"]] if "v" in names else [])]
        )
        outputs = [prefix + name for name in ("output", "present_key", "present_value")]
        outputs += ["", prefix + "present_hp_key", prefix + "present_hp_value"]
        node_attributes = attributes[str(layer.index)]
        nodes.append(
            helper.make_node(
                OPERATOR,
                inputs,
                outputs,
                name=prefix + "attention",
                domain=DOMAIN,
                **node_attributes,
            )
        )
        values |= _shapes(layer, prefix, serving, node_attributes)
    taken = [name for name in values if "present" not in name and not name.endswith("output")]
    graph = helper.make_graph(
        nodes,
        "rotations",
        [_info(name, values[name]) for name in taken],
        [_info(name, values[name]) for name in values if name not in taken],
        initializers,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(
        graph, opset_imports=opsets, ir_version=10, producer_name="rotationzoo"
    )
    helper.set_model_props(
        model, {f"rotationzoo.{key}": str(value) for key, value in serving.provenance.items()}
    )
    onnx.save(model, str(work / FRAGMENT))
    content = {
        "operator": f"{DOMAIN}.{OPERATOR}",
        "inputs": {"18": "oscar_rotation_k", "19": "oscar_rotation_v"},
    }
    (work / ATTRIBUTES).write_text(
        json.dumps({**content, "layers": attributes}, indent=2) + "\n", encoding="utf-8"
    )
    notes = [
        "needs an ONNX Runtime with pull request 31726, on a CPU",
        "it may round halves to even, which no codec here does",
    ]
    if serving.value is None:
        notes.append("the nodes have no value rotation: the weights carry it")
    command = [
        f"# replace each GroupQueryAttention node by the one of its layer in {final / FRAGMENT}, weights by initializers"
    ]
    return Launch(command, {}, notes)


def tile(side: Side, layer: Layer) -> torch.Tensor:
    """A layer's rotation `(H_kv, D, D)`, repeated for every KV head where they share one."""
    matrix = side.rotation[layer.index]
    shared = matrix.expand(layer.kv_heads, -1, -1) if matrix.ndim == 2 else matrix
    return shared.contiguous()


def _attributes(layer: Layer, serving: Payload) -> dict[str, Any]:
    key_clip, value_clip = serving.clips[layer.index]
    return {
        "num_heads": layer.query_heads,
        "kv_num_heads": layer.kv_heads,
        "kv_quant_group_size": serving.group_size or 0,
        "k_quant_rho": key_clip,
        "v_quant_rho": value_clip,
        "metadata_type": "fp32",
        "sink_size": serving.sink,
        "recent_size": serving.recent,
        "cache_format_version": 1,
    }


def _shapes(
    layer: Layer, prefix: str, serving: Payload, attributes: dict[str, Any]
) -> dict[str, tuple[str, list[Any]]]:
    """Name -> type and shape of a node's inputs and outputs; a packed row has D / 4 bytes of codes
    and 8 a group."""
    dim, heads = layer.key_dim, layer.kv_heads
    packed = dim // 4 + dim // (attributes["kv_quant_group_size"] or dim) * 8
    window = serving.sink + serving.recent
    shapes: dict[str, tuple[str, list[Any]]] = {
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
    shared: dict[str, tuple[str, list[Any]]] = {
        "seqlens_k": ("INT32", ["batch"]),
        "total_sequence_length": ("INT32", [1]),
    }
    return {prefix + name: shape for name, shape in shapes.items()} | shared


def _info(name: str, shape: tuple[str, list[Any]]) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, getattr(TensorProto, shape[0]), shape[1])
