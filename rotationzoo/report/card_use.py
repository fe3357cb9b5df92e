"""The sections of a model card on the matrices: what they are for, how to use them with
rotationzoo and without, and how small the cache gets."""

from rotationzoo.artifact.layout import matrix_name, tensor_name
from rotationzoo.artifact.manifest import Manifest
from rotationzoo.codec import int2
from rotationzoo.model.geometry import Geometry
from rotationzoo.recipe import Recipe
from rotationzoo.report.commands import name_in_commands
from rotationzoo.report.tables import Table
from rotationzoo.rotations import SIDES
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.size import CONTEXT, bits_per_element
from rotationzoo.words import counted


def matrices_section(manifest: Manifest, recipe: Recipe, cached: Geometry) -> str:
    """The sections on what the artifact is, how to use it, and the size of a cache.

    `cached`: the layers that have a cache.
    """
    each = "one rotation per KV head" if recipe.pooling == "head" else "one rotation per layer"
    stored_key, stored_value, output = _formulas(recipe)
    clips = manifest.clip_ratios
    notes = "".join(f"* Note: {note}\n" for note in manifest.notes)
    name = name_in_commands(manifest.model)
    return f"""## What this is

* Orthogonal matrices for keys and values: {each}, in {counted(len(cached), "layer")}
* Model: {_describe_model(manifest)}
* To serve with: clip ratios {clips["key"]:g} for keys and {clips["value"]:g} for values, the \
first {recipe.sink} and the last {recipe.recent} tokens exact, {_groups(recipe)}
* Largest `|R R^T - I|`: {manifest.metrics.orthogonality_error:.1e}
{notes}
Row vectors, after RoPE: `q R_K`, `{stored_key}`, `{stored_value}`, and the attention \
output times `{output}`.
Scores (but for what a softmax ignores) and outputs are unchanged before quantization. In \
`rotations.safetensors`,
`layers.N.key.rotation` and `layers.N.value.rotation` are float32 `[KV heads, D, D]`, \
with a first dimension of 1 when the
heads share one; N counts all layers of the model.
{_feedback_section(recipe)}
    rotationzoo verify FOLDER --model {name}   # whole, orthogonal, and of this model
    rotationzoo evaluate {name} FOLDER        # what it costs, on your text
    rotationzoo export FOLDER --to sglang   # or vllm, llama.cpp, mlx: files, and the command that \
starts it

Without rotationzoo:

```python
{_rotating_code(recipe, cached[0].index)}
```

Bits per cached element, with a scale and an offset for each quantization group, \
and of {CONTEXT:,} tokens the first
{recipe.sink} and the last {recipe.recent} in bfloat16:

{_sizes(recipe, cached).markdown()}
"""


def _describe_model(manifest: Manifest) -> str:
    model = manifest.model
    if model.config_sha256 is None:
        return "not named yet"
    return f"`{model.id}`, revision `{model.revision or 'local folder'}`, {model.architecture}"


def _formulas(recipe: Recipe) -> tuple[str, str, str]:
    """Formulas for stored keys, for stored values, and for the factor of the attention output."""
    key = "(k - mean)" if recipe.center_keys else "k"
    value = "(v - mean)" if recipe.center_values else "v"
    output = "R_V^T` plus `mean" if recipe.center_values else "R_V^T"
    return f"{key} R_K", f"{value} R_V", output


def _feedback_section(recipe: Recipe) -> str:
    """The use of the factors of error feedback, as a paragraph; empty for others."""
    if not recipe.feedback:
        return ""
    return """
`layers.N.{key,value}.feedback` (`[KV heads, D, D]`) are for a writer of the cache that chooses the
codes of a row together, so that each makes up for the errors of the others. A factor is U with d on
its diagonal, of the metric `U diag(d) U^T` in which errors of stored rows count (U unit upper
triangular). Reader, format and size stay the same, and a writer that rounds to the nearest codes,
as engines do today, needs none of this.
"""


def _groups(recipe: Recipe) -> str:
    if recipe.group_size:
        return f"quantization groups of {recipe.group_size} channels"
    return "one quantization group a head"


def _sizes(recipe: Recipe, geometry: Geometry) -> Table:
    rows = []
    for name, format in int2.FORMATS.items():
        bits = bits_per_element(geometry, CacheLayout.of_recipe(recipe, format))
        metadata = str(format.metadata).removeprefix("torch.")
        rows.append([name, metadata, f"{bits:.2f}", f"{16 / bits:.1f} times"])
    return Table("size", ["format", "scale, offset", "bits", "smaller than bfloat16"], rows)


def _rotating_code(recipe: Recipe, layer: int) -> str:
    """Code without rotationzoo that rotates one layer's queries, keys and values for serving, and
    rotates the attention output back."""
    lines = [
        "from safetensors.torch import load_file",
        "",
        'tensors = load_file("rotations.safetensors")',
    ]
    stored = {}
    for side in SIDES:
        rows = side[0]
        stored[side] = rows
        lines.append(f'{side} = tensors["{matrix_name(layer, side)}"]')
        if side in recipe.centered:
            mean = tensor_name(layer, side, "mean")
            lines.append(f'{side}_mean = tensors["{mean}"]  # [KV heads, D]')
            stored[side] = f"({rows} - {side}_mean[head])"
    head = "head" if recipe.pooling == "head" else "0"
    pairs = (("q", "key"), (stored["key"], "key"), (stored["value"], "value"))
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
        '    """The attention output over stored values [T, D], rotated back."""',
        f"    return output @ value[{head}].mT{mean}",
    ]  # fmt: skip
    return "\n".join(lines)
