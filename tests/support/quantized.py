"""Quantized checkpoints, written as their makers publish them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def set_quantization(folder: Path, **table) -> None:
    """Let a model's config say how its weights are quantized."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": table}
    (folder / "config.json").write_text(json.dumps(config))


def quantize_to_fp8(folder: Path, block: int = 128) -> dict[str, torch.Tensor]:
    """Store the projections in blocks of FP8 with their scales, as Qwen3-8B-FP8 and MiniMax-M2.7
    do, and return what they stand for. The last blocks may be cut short."""
    stored, exact = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = weight.bfloat16()
            continue
        rows, columns = weight.shape
        padding = (0, -columns % block, 0, -rows % block)
        grid = torch.nn.functional.pad(weight, padding)
        grid = grid.unflatten(0, (-1, block)).unflatten(2, (-1, block))
        scale = grid.abs().amax((1, 3)) / 448
        codes = (grid / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        whole = (codes.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)
        stored[name] = codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
        stored[f"{name}_scale_inv"] = scale
        exact[name] = whole[:rows, :columns].bfloat16()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantization(
        folder,
        quant_method="fp8",
        activation_scheme="dynamic",
        weight_block_size=[block, block],
    )
    return exact


def quantize_rows_to_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Store the projections in FP8 with a scale a row, as compressed-tensors' `float-quantized`
    does, and return what they stand for."""
    stored, exact = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = weight.bfloat16()
            continue
        scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        stored[name] = (weight / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = scale
        exact[name] = stored[name].float() * scale.float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    set_quantization(
        folder,
        quant_method="compressed-tensors",
        format="float-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
        config_groups={"group_0": group},
    )
    return exact


def quantize_to_4_bits(folder: Path, method: str, group: int = 128) -> dict[str, torch.Tensor]:
    """Store the projections in groups of 4-bit codes as AutoGPTQ (`gptq`, version 1) or AutoAWQ
    (`awq`, gemm) pack them, and return what they stand for."""
    stored, exact = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = weight.half()
            continue
        rows = weight.unflatten(1, (-1, group))
        low, high = rows.amin(2), rows.amax(2)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(1, 15)
        codes = (rows / scale[..., None] + zero[..., None]).round().clamp(0, 15)
        exact[name] = ((codes - zero[..., None]) * scale[..., None]).flatten(1)
        codes, module = codes.flatten(1).T, name.removesuffix(".weight")
        stored[f"{module}.scales"] = scale.T.half().contiguous()
        if method == "gptq":
            stored[f"{module}.qweight"] = _pack(codes, 0, range(8))
            stored[f"{module}.qzeros"] = _pack(zero.T - 1, 1, range(8))
            stored[f"{module}.g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // group
        else:
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            stored[f"{module}.qweight"] = _pack(codes, 1, order)
            stored[f"{module}.qzeros"] = _pack(zero.T, 1, order)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    table = {"quant_method": method, "bits": 4, "group_size": group}
    if method == "gptq":
        table |= {"desc_act": False, "sym": False, "checkpoint_format": "gptq"}
    else:
        table |= {"zero_point": True, "version": "gemm"}
    set_quantization(folder, **table)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    return exact


def _pack(codes: torch.Tensor, dim: int, order) -> torch.Tensor:
    """Eight 4-bit codes along a dimension in each int32, the first of `order` lowest."""
    eights = codes.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    words = sum(eights[..., index] << (4 * place) for place, index in enumerate(order))
    words = torch.where(words < 2**31, words, words - 2**32)
    return words.int().movedim(-1, dim).contiguous()
