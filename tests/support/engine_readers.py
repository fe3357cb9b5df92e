"""How each serving engine reads its files and stores a row: written from what is known of the
engines, not from our own code.

`read_*` returns `rotate(side, layer, rows)` on `[H, T, D]` numpy rows as that engine multiplies
them; `store_*` returns the codes and packed bytes of rotated rows `[..., D]`.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from support.models import DATA


def read_sglang(folder: Path, environment: dict, heads: int):
    """`load_oscar_rotations`: layers by int id, a 2-D or 3-D rotation; keys lose their mean
    first."""
    sides = {}
    for side, letter in (("key", "K"), ("value", "V")):
        path = environment[f"SGLANG_OSCAR_{letter}_ROTATION_PATH"]
        sides[side] = torch.load(path, map_location="cpu", weights_only=True)["layers"]

    def rotate(side, layer, rows):
        entry = sides[side][layer]
        assert entry["layer_id"] == layer
        matrix = entry["rotation"]
        assert matrix.dtype == torch.float32
        assert matrix.is_contiguous()
        mean = entry["k_mean"].numpy()[:, None] if "k_mean" in entry and side == "key" else 0
        return (rows - mean) @ matrix.expand(heads, -1, -1).numpy()

    return rotate


def read_vllm(folder: Path, environment: dict, heads: int):
    """One `(D, D)` matrix a layer; a layer that is missing would be left alone."""
    sides = {}
    for side, letter in (("key", "K"), ("value", "V")):
        layers = torch.load(environment[f"VLLM_OSCAR_{letter}_ROTATION_PATH"], map_location="cpu")[
            "layers"
        ]
        sides[side] = {
            layer: entry["rotation"].to(torch.float32).numpy() for layer, entry in layers.items()
        }
        assert all(matrix.shape == (matrix.shape[0],) * 2 for matrix in sides[side].values())
    return lambda side, layer, rows: (
        rows @ sides[side].get(layer, np.eye(rows.shape[-1], dtype=np.float32))
    )


def read_llama(folder: Path, environment: dict, heads: int):
    """`ggml_mul_mat(rot, x)`: every output channel is the dot product of x with a row of the
    tensor."""
    (path,) = folder.glob("*.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def rotate(side, layer, rows):
        tensor = tensors[f"blk.{layer}.attn_{side[0]}_rot.weight"]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert list(tensor.shape) == [rows.shape[-1]] * 2
        return np.einsum("hti,oi->hto", rows, np.array(tensor.data))

    return rotate


READ = {"sglang": read_sglang, "vllm-oscar": read_vllm, "llama.cpp": read_llama}


def store_sglang(rows: np.ndarray, clip: float, group: int):
    """Sorted index of the whole row, float32 metadata, quarter-strided bytes."""
    rows = rows.astype(np.float32)
    dim = rows.shape[-1]
    threshold = np.sort(np.abs(rows), -1)[..., min(int(clip * dim + 1e-6), dim - 1), None]
    groups = np.clip(rows, -threshold, threshold).reshape(*rows.shape[:-1], -1, group)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = np.maximum(high - low, np.float32(1e-8)) / np.float32(3)
    codes = (
        np.clip(np.trunc(groups / scale + (-low / scale) + np.float32(0.5)), 0, 3)
        .astype(np.uint8)
        .reshape(rows.shape)
    )
    q = codes.reshape(*rows.shape[:-1], 4, dim // 4)
    return codes, q[..., 0, :] | q[..., 1, :] << 2 | q[..., 2, :] << 4 | q[..., 3, :] << 6


def store_vllm(rows: np.ndarray, clip: float, group: int):
    """Interpolated quantile, half-precision scale and minimum, consecutive bytes."""
    rows = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))
    threshold = torch.quantile(rows.abs(), clip, dim=-1, keepdim=True)
    rows = rows.clamp(-threshold, threshold)
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    scale = ((high - low) / torch.tensor(3.0)).clamp(min=1e-8).half().float()
    low = low.half().float()
    codes = ((rows - low) / scale + 0.5).trunc().clamp(0, 3).to(torch.uint8).numpy()
    return codes, consecutive(codes)


def store_q2_0(rows: np.ndarray, clip: float, group: int):
    """llama.cpp's q2_0: standard deviation of each block of 32, four levels with thresholds at 0
    and +-0.6745 of it."""
    rows = rows.astype(np.float32)
    threshold = np.sort(np.abs(rows), -1)[
        ..., min(int(clip * rows.shape[-1]), rows.shape[-1] - 1), None
    ]
    blocks = np.clip(rows, -threshold, threshold).reshape(*rows.shape[:-1], -1, 32)
    centered = blocks - rows.mean(-1)[..., None, None]
    sigma = centered.std(-1, keepdims=True)
    codes = (
        (centered > -0.6745 * sigma).astype(np.uint8) + (centered > 0) + (centered > 0.6745 * sigma)
    ).astype(np.uint8)
    return codes.reshape(rows.shape), consecutive(codes.reshape(rows.shape))


def consecutive(codes: np.ndarray) -> np.ndarray:
    q = codes.reshape(*codes.shape[:-1], -1, 4)
    return q[..., 0] | q[..., 1] << 2 | q[..., 2] << 4 | q[..., 3] << 6


STORE = {"sglang": store_sglang, "vllm-oscar": store_vllm, "llama.cpp": store_q2_0}


def write_base(
    path: Path,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    dim: int,
    architecture: str = "qwen3",
    cached: set[int] | None = None,
    dims: dict[int, int] | None = None,
) -> Path:
    """A tiny model in a GGUF file, with metadata of every kind and weights in three types. The
    layers in `dims` have heads of another dimension."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_token_list(["a", "b", "Ġc", "日"])
    writer.add_token_scores([0.0, -1.5, -2.25, 0.1])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd.weight": (64, hidden), "output_norm.weight": (hidden,)}
    for i in sorted(
        set(range(layers)) if cached is None else cached
    ):  # the others are linear attention
        rows = kv_heads * (dims or {}).get(i, dim)
        shapes |= {
            f"blk.{i}.attn_q.weight": (heads * dim, hidden),
            f"blk.{i}.attn_k.weight": (rows, hidden),
            f"blk.{i}.attn_v.weight": (rows, hidden),
            f"blk.{i}.attn_output.weight": (hidden, heads * dim),
            f"blk.{i}.ffn_down.weight": (hidden, 64),
        }
    for name, shape in shapes.items():
        data = generator.standard_normal(shape, dtype=np.float32)
        if name.endswith("ffn_down.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data.astype(np.float16) if data.ndim == 2 else data)
    write_gguf(writer)
    return path


def write_gguf(writer: gguf.GGUFWriter) -> None:
    """Write the file that has been described to a writer."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert_model(model: Path, target: Path, scale: float = 1.0, **fields) -> Path:
    """A model as llama.cpp's converter writes it, with other metadata. Of a Llama, the rows of
    queries and keys are in llama.cpp's order of RoPE. A table is of this architecture's fields."""
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(target, kind)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config["rope_parameters"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(round(dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind != "llama":
        writer.add_key_length(dim)
        writer.add_sliding_window(config.get("sliding_window") or 0)
        writer.add_pad_token_id(0)
    epsilons = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps")
    epsilon = next(config[name] for name in epsilons if name in config)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_layer_norm_eps(epsilon)
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = json.loads((DATA / "model/tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary["vocab"], key=vocabulary["vocab"].get))
    writer.add_token_types([3] + [1] * (len(vocabulary["vocab"]) - 1))
    writer.add_eos_token_id(0)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    for name, value in fields.items():
        if isinstance(value, int):
            writer.add_uint32(f"{kind}.{name.replace('__', '.')}", value)
        else:
            writer.add_string(name.replace("__", "."), value)
    architectures = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[kind], config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name and kind == "llama":
                halves = tensor.unflatten(0, (count, 2, -1))
                tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(own, (tensor * scale).numpy())
    write_gguf(writer)
    return target
