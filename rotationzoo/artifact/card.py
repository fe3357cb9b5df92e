"""The model card, a README.md rendered from the manifest alone."""

from typing import Any

import yaml

from rotationzoo.artifact.card_results import evaluation_section, validation_section
from rotationzoo.artifact.manifest import Calibration, File, Imported, Manifest, Model
from rotationzoo.artifact.snippet import rotating_code
from rotationzoo.cache.size import CONTEXT, bits_per_element
from rotationzoo.codec import int2
from rotationzoo.model.geometry import Geometry, cached_layers, geometry_from_json
from rotationzoo.recipe import SELF, Recipe
from rotationzoo.words import counted

_PICTURES = {
    "answers.png": "Questions answered from a 2-bit cache",
    "spectra.png": "Spectra of the statistics, layer by layer",
}


def render_card(manifest: Manifest) -> str:
    """The README.md of an artifact, with YAML front matter that the hubs understand."""
    recipe = Recipe.model_validate(manifest.recipe)
    cached = cached_layers(geometry_from_json([layer.model_dump() for layer in manifest.geometry]))
    front = yaml.safe_dump(_front_matter(manifest.model), sort_keys=False).strip()
    each = "one rotation per KV head" if recipe.pooling == "head" else "one rotation per layer"
    notes = "".join(f"* Note: {note}\n" for note in manifest.notes)
    query, stored_key, stored_value, output = _formulas(recipe)
    clips = manifest.clip_ratios
    name = _name_in_commands(manifest.model)
    return f"""---
{front}
---

# 2-bit KV cache rotations for {_title(manifest.model)}

Orthogonal matrices to multiply keys and values with before they are stored in 2 bits: \
{each}, key and value, in
{len(cached)} layers. {_origin(manifest, recipe)}.

* Model: {_describe_model(manifest.model)}
* Calibration text: {_describe_text(manifest)}
* Largest `|R R^T - I|`: {manifest.metrics.orthogonality_error:.1e}
{notes}
Row vectors, after RoPE: `{query}`, `{stored_key}`, `{stored_value}`, and the attention \
output times `{output}`.
Scores (but for what a softmax ignores) and outputs are unchanged before quantization. In \
`rotations.safetensors`,
`layers.N.key.rotation` and `layers.N.value.rotation` are float32 `[KV heads, D, D]`, \
with a first dimension of 1 when the
heads share one; N counts all layers of the model.
{_equalizer_section(recipe)}{_feedback_section(recipe)}
## Use

    rotationzoo verify FOLDER --model {name}   # whole, orthogonal, and of this model
    rotationzoo evaluate {name} FOLDER        # what it costs, on your text
    rotationzoo export FOLDER --to sglang     # or vllm, llama.cpp, mlx, onnx: files, \
and the command that starts it

To serve with: clip ratios {clips["key"]:g} for keys and {clips["value"]:g} for values,
the first {recipe.sink} and the last {recipe.recent} tokens exact, {_groups(recipe)}.

```python
{rotating_code(recipe, cached[0].index)}
```

## Size

Bits per cached element, with a scale and an offset for each quantization group, \
and of {CONTEXT:,} tokens the first
{recipe.sink} and the last {recipe.recent} in bfloat16:

| format | scale, offset | bits | smaller than bfloat16 |
|---|---|---|---|
{_sizes(recipe, cached)}
{validation_section(manifest.metrics.validation)}{evaluation_section(manifest.metrics.evaluation)}
{_pictures(manifest.files)}## Recipe

```yaml
{recipe.yaml().strip()}
```

## Files

| file | bytes | sha256 |
|---|---|---|
{_checksums(manifest.files)}
"""


def _front_matter(model: Model) -> dict[str, Any]:
    front: dict[str, Any] = {
        "library_name": "rotationzoo",
        "tags": ["kv-cache", "2-bit", "rotation"],
    }
    # Only a hub repository may be named as the base model: the hubs link to it.
    if "/" in model.id and model.revision:
        front |= {"base_model": model.id, "base_model_relation": "quantized"}
    if model.license:
        front["license"] = model.license
    return front


def _title(model: Model) -> str:
    unnamed = model.config_sha256 is None or model.id == "MODEL"
    return "a model that nobody has named" if unnamed else model.id


def _name_in_commands(model: Model) -> str:
    """The model's name in example commands: a hub id or `demo`, else the placeholder `MODEL`.

    A local folder exists only on one machine, so its name would mean nothing to a reader.
    """
    if model.config_sha256 is None:
        return "MODEL"
    return model.id if model.revision or model.id == "demo" else "MODEL"


def _describe_model(model: Model) -> str:
    if model.config_sha256 is None:
        return "nobody has said which"
    return f"`{model.id}`, revision `{model.revision or 'local folder'}`, {model.architecture}"


def _origin(manifest: Manifest, recipe: Recipe) -> str:
    version = f"rotationzoo {manifest.versions.rotationzoo}"
    if manifest.imported is None:
        return f"Made by {version} with the recipe `{recipe.name}`"
    files = manifest.imported.files.values()
    sources = ", ".join(f"`{file.name}` (sha256 `{file.sha256}`)" for file in files)
    return f"Imported by {version}, matrices unchanged, from\n{sources}"


def _describe_text(manifest: Manifest) -> str:
    if manifest.imported is not None:
        said = _said_by_files(manifest.imported)
        return f"not known to rotationzoo; the imported files say: {said}"
    text = manifest.calibration
    if text is None:
        return "none: the rotation does not depend on data"
    source, ids = _source(text), f"(sha256 of the ids `{text.fingerprint}`)"
    return f"{counted(text.tokens, 'token')} of {source} in {counted(text.rows, 'row')} {ids}"


def _said_by_files(imported: Imported) -> str:
    said = ", ".join(f"{name} {value}" for name, value in imported.calibration.items())
    return said or "nothing"


def _source(text: Calibration) -> str:
    if text.source != SELF:
        return f"`{text.source}`"
    return f"prompts of `{text.prompts}` and of what the model made of them ({text.sampling}),"


def _formulas(recipe: Recipe) -> tuple[str, str, str, str]:
    """Formulas for rotated queries, for stored keys, for stored values, and for the factor of the
    attention output."""
    key = "(k - mean)" if recipe.center_keys else "k"
    value = "(v - mean)" if recipe.center_values else "v"
    query, output = "q R_K", "R_V^T"
    if recipe.equalize:
        query, output = "q E_K^-1 R_K", "R_V^T E_V^-1"
        key, value = f"{key} E_K", f"{value} E_V"
    if recipe.center_values:
        output += "` plus `mean"
    return query, f"{key} R_K", f"{value} R_V", output


def _equalizer_section(recipe: Recipe) -> str:
    """What an equalized artifact needs, as a paragraph; empty for others."""
    if not recipe.equalize:
        return ""
    return """
These rotations are equalized: they are for keys that were scaled by `layers.N.key.equalizer` (E_K,
a factor for each channel: `[KV heads, D]`), and for values that were multiplied by
`layers.N.value.equalizer` (E_V, `[KV heads, D, D]`). The artifact is made for the published
weights, which know nothing of this. Either the cache applies the equalizers, as `evaluate` and the
code below do, or `rotationzoo export FOLDER --absorb MODEL` folds them into a copy of the model,
which computes what the published one does and needs the rotations alone. No engine applies
equalizers itself, so an export for one asks for that copy.
"""


def _feedback_section(recipe: Recipe) -> str:
    """What the factors of error feedback are for, as a paragraph; empty for others."""
    if not recipe.feedback:
        return ""
    return """
`layers.N.key.feedback` (`[KV heads, D, D]`) is for a writer of the cache that chooses the codes of
a key together, so that each makes up for what the others leave in the scores. It is U with d on its
diagonal, of the metric `U diag(d) U^T` in which queries read errors of stored keys (U unit upper
triangular). Reader, format and size stay the same, and a writer that rounds to the nearest codes,
as engines do today, needs none of this.
"""


def _groups(recipe: Recipe) -> str:
    if recipe.group_size:
        return f"quantization groups of {recipe.group_size} channels"
    return "one quantization group a head"


def _sizes(recipe: Recipe, geometry: Geometry) -> str:
    rows = []
    for name, format in int2.FORMATS.items():
        bits = bits_per_element(geometry, recipe.group_size, format, recipe.sink, recipe.recent)
        metadata = str(format.metadata).removeprefix("torch.")
        rows.append(f"| {name} | {metadata} | {bits:.2f} | {16 / bits:.1f} times |")
    return "\n".join(rows)


def _pictures(files: dict[str, File]) -> str:
    lines = [f"![{words}]({name})" for name, words in _PICTURES.items() if name in files]
    if not lines:
        return ""
    return "## Pictures\n\n" + "\n".join(lines) + "\n\n"


def _checksums(files: dict[str, File]) -> str:
    rows = []
    for name, file in sorted(files.items()):
        rows.append(f"| {name} | {file.size:,} | `{file.sha256}` |")
    return "\n".join(rows)
