"""Quantized checkpoints, written as their makers publish them."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.models import edit_config


def set_quantization(folder: Path, **table) -> None:
    """Let a model's config say how its weights are quantized."""
    edit_config(folder, dtype="bfloat16", quantization_config=table)


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
        folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[block, block]
    )
    return exact
