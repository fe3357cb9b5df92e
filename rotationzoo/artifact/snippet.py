"""The Python code on a model card: how to use the matrices without rotationzoo."""

from rotationzoo.artifact.layout import matrix_name, tensor_name
from rotationzoo.recipe import Recipe
from rotationzoo.rotations import SIDES


def rotating_code(recipe: Recipe, layer: int) -> str:
    """Code that rotates one layer's queries, keys and values for serving, and rotates the attention
    output back."""
    lines = [
        "from safetensors.torch import load_file",
        "",
        'tensors = load_file("rotations.safetensors")',
    ]
    query, undone, stored = "q", "", {}
    for side in SIDES:
        rows = side[0]
        stored[side] = rows
        lines.append(f'{side} = tensors["{matrix_name(layer, side)}"]')
        if side in recipe.centered:
            mean = tensor_name(layer, side, "mean")
            lines.append(f'{side}_mean = tensors["{mean}"]  # [KV heads, D]')
            stored[side] = f"({rows} - {side}_mean[head])"
    if recipe.equalize:
        factors, scales = (tensor_name(layer, side, "equalizer") for side in SIDES)
        lines.append(f'key_factors = tensors["{factors}"]  # [KV heads, D]')
        lines.append(f'value_scales = tensors["{scales}"]  # [KV heads, D, D]')
        query = "(q / key_factors[head])"
        stored["key"] = f"({stored['key']} * key_factors[head])"
        stored["value"] += " @ value_scales[head]"
        undone = " @ value_scales[head].inverse()"
    head = "head" if recipe.pooling == "head" else "0"
    pairs = ((query, "key"), (stored["key"], "key"), (stored["value"], "value"))
    rotated = ", ".join(f"{rows} @ {side}[{head}]" for rows, side in pairs)
    mean = " + value_mean[head]" if "value" in recipe.centered else ""
    read = "what reads the keys, and what is stored in 2 bits"
    lines += [
        "", "",
        "def rotate(q, k, v, head):",
        f'    """Rows [T, D] of one KV head after RoPE: {read}."""',
        f"    return {rotated}",
        "", "",
        "def restore(output, head):",
        '    """What attention makes of the stored values [T, D], turned back."""',
        f"    return output @ value[{head}].mT{undone}{mean}",
    ]  # fmt: skip
    return "\n".join(lines)
