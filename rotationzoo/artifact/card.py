"""The model card: what an artifact is, in words, from its manifest alone."""

from typing import Any

import yaml

from rotationzoo.artifact.manifest import (
    Calibration,
    EvaluationSummary,
    File,
    Manifest,
    Model,
    ValidationSummary,
)
from rotationzoo.cache.size import CONTEXT, bits_per_element
from rotationzoo.codec import int2
from rotationzoo.model.geometry import Geometry, cached_layers, geometry_from_json
from rotationzoo.recipe import SELF, Recipe


def render(manifest: Manifest) -> str:
    """The README.md of an artifact, with front matter that the hubs understand."""
    model, recipe = manifest.model, Recipe.model_validate(manifest.recipe)
    name = "MODEL" if model.config_sha256 is None else model.id
    cached = cached_layers(geometry_from_json([layer.model_dump() for layer in manifest.geometry]))
    front: dict[str, Any] = {
        "library_name": "rotationzoo",
        "tags": ["kv-cache", "2-bit", "rotation"],
    }
    if "/" in model.id and model.revision:
        front |= {"base_model": model.id, "base_model_relation": "quantized"}
    if model.license:
        front["license"] = model.license
    matrices = "one rotation per KV head" if recipe.pooling == "head" else "one rotation per layer"
    data = manifest.calibration
    text = (
        f"{data.tokens:,} tokens of {_source(data)} in {data.rows} rows (sha256 of the ids `{data.fingerprint}`)"
        if data
        else "none: the rotation does not depend on data"
    )
    made = f"Made by rotationzoo {manifest.versions.rotationzoo} with the recipe `{recipe.name}`"
    if imported := manifest.imported:
        said = (
            ", ".join(f"{name} {value}" for name, value in imported.calibration.items())
            or "nothing"
        )
        text = f"not known to rotationzoo; the imported files say: {said}"
        made = (
            f"Imported by rotationzoo {manifest.versions.rotationzoo}, matrices unchanged, from\n"
        )
        made += ", ".join(
            f"`{file.name}` (sha256 `{file.sha256}`)" for file in imported.files.values()
        )
    title = "a model that nobody has named" if name == "MODEL" else name
    if not model.revision and name != "demo":
        name = "MODEL"  # a folder of somebody's machine
    stored_key = "(k - mean) R_K" if recipe.center_keys else "k R_K"
    stored_value, output = (
        ("(v - mean) R_V", "R_V^T` plus `mean") if recipe.center_values else ("v R_V", "R_V^T")
    )
    clips = manifest.clip_ratios
    groups = (
        f"quantization groups of {recipe.group_size} channels"
        if recipe.group_size
        else "one quantization group a head"
    )
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# 2-bit KV cache rotations for {title}

Orthogonal matrices to multiply keys and values with before they are stored in 2 bits: {matrices}, key and value, in
{len(cached)} layers. {made}.

* Model: {_model(model)}
* Calibration text: {text}
* Largest `|R R^T - I|`: {manifest.metrics.orthogonality_error:.1e}
{"".join(f"* Note: {note}{chr(10)}" for note in manifest.notes)}
Row vectors, after RoPE: `q R_K`, `{stored_key}`, `{stored_value}`, and the attention output times `{output}`.
Scores (but for what a softmax ignores) and outputs are unchanged before quantization. In `rotations.safetensors`,
`layers.N.key.rotation` and `layers.N.value.rotation` are float32 `[KV heads, D, D]`, with a first dimension of 1 when the
heads share one; N counts all layers of the model.

## Use

    rotationzoo verify FOLDER --model {name}   # whole, orthogonal, and of this model
    rotationzoo evaluate {name} FOLDER        # what it costs, on your text
    rotationzoo export FOLDER --to sglang     # or vllm, llama.cpp, mlx, onnx: files, and the command that starts it

To serve with: clip ratios {clips["key"]:g} for keys and {clips["value"]:g} for values,
the first {recipe.sink} and the last {recipe.recent} tokens exact, {groups}.

```python
{_snippet(recipe, cached[0].index)}
```

## Size

Bits per cached element, with a scale and an offset for each quantization group, and of {CONTEXT:,} tokens the first
{recipe.sink} and the last {recipe.recent} in bfloat16:

| format | scale, offset | bits | smaller than bfloat16 |
|---|---|---|---|
{_sizes(recipe, cached)}
{_validation(manifest.metrics.validation)}{_evaluation(manifest.metrics.evaluation)}
{_pictures(manifest.files)}## Recipe

```yaml
{recipe.yaml().strip()}
```

## Files

| file | bytes | sha256 |
|---|---|---|
{_checksums(manifest.files)}
"""


def _source(data: Calibration) -> str:
    if data.source != SELF:
        return f"`{data.source}`"
    return f"prompts of `{data.prompts}` and of what the model made of them ({data.sampling}),"


def _model(model: Model) -> str:
    if model.config_sha256 is None:
        return "nobody has said which"
    return f"`{model.id}`, revision `{model.revision or 'local folder'}`, {model.architecture}"


def _pictures(files: dict[str, File]) -> str:
    shown = {
        "spectra.png": "Spectra of the statistics, layer by layer",
        "error_by_layer.png": "Error by layer",
    }
    lines = [f"![{words}]({name})" for name, words in shown.items() if name in files]
    return "## Pictures\n\n" + "\n".join(lines) + "\n\n" if lines else ""


def _checksums(files: dict[str, File]) -> str:
    return "\n".join(
        f"| {name} | {file.size:,} | `{file.sha256}` |" for name, file in sorted(files.items())
    )


def _sizes(recipe: Recipe, geometry: Geometry) -> str:
    rows = []
    for name, form in int2.FORMATS.items():
        bits = bits_per_element(geometry, recipe.group_size, form, recipe.sink, recipe.recent)
        rows.append(
            f"| {name} | {str(form.metadata).removeprefix('torch.')} | {bits:.2f} | {16 / bits:.1f} times |"
        )
    return "\n".join(rows)


def _snippet(recipe: Recipe, layer: int) -> str:
    """Python that rotates one layer's queries, keys and values as they are served, and the output
    back."""
    head = "head" if recipe.pooling == "head" else "0"
    lines = [
        "from safetensors.torch import load_file",
        "",
        'tensors = load_file("rotations.safetensors")',
    ]
    for side in ("key", "value"):
        lines.append(f'{side} = tensors["layers.{layer}.{side}.rotation"]')
        if side in recipe.centered:
            lines.append(f'{side}_mean = tensors["layers.{layer}.{side}.mean"]  # [KV heads, D]')
    stored = {
        side: f"({side[0]} - {side}_mean[head])" if side in recipe.centered else side[0]
        for side in ("key", "value")
    }
    mean = " + value_mean[head]" if "value" in recipe.centered else ""
    lines += [
        "", "",
        "def rotate(q, k, v, head):",
        '    """Rows [T, D] of one KV head after RoPE: what reads the keys, and what is stored in 2 bits."""',
        f"    return q @ key[{head}], {stored['key']} @ key[{head}], {stored['value']} @ value[{head}]",
        "", "",
        "def restore(output, head):",
        '    """What attention makes of the stored values [T, D], turned back."""',
        f"    return output @ value[{head}].mT{mean}",
    ]  # fmt: skip
    return "\n".join(lines)


def _validation(validation: ValidationSummary | None) -> str:
    if validation is None:
        return "\nThe CUDA reference has not been run on these matrices.\n"
    if not validation.on_gpu:
        return "\nNot validated on a GPU: only the codec's definition was run on these matrices, on a CPU.\n"
    equal = (
        "bit-equal to"
        if validation.codes_equal and validation.dequantized_equal
        else "NOT equal to"
    )
    return f"""
## Validation

On {validation.device}, `int2.cu` gave codes and values {equal} the definition for {validation.rows:,} rows of all layers and heads
(`validation.json`).
"""


def _evaluation(evaluation: EvaluationSummary | None) -> str:
    if evaluation is None:
        return ""
    measures = {"perplexity_increase": "+.2%", "attention_kl": ".4f", "output_error": ".3f"}
    lines = []
    for name, arm in evaluation.arms.items():
        errors = arm.standard_error
        cells = (
            _with_error(getattr(arm, key), errors.get(key), form) for key, form in measures.items()
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    verdict = "".join(f"* {words}\n" for words in evaluation.verdict)
    return f"""
## What it costs the model

Perplexity of the exact model on {evaluation.tokens:,} tokens past the windows of `{evaluation.text}`: {evaluation.perplexity:.3f}.
With a 2-bit cache of the format {evaluation.format} and windows {evaluation.sink}/{evaluation.recent}{chunks(evaluation.prefill_chunk, evaluation.prefill_layout)},
{_error_words(evaluation.texts)}:

| rotation | perplexity | attention KL | error of the attention block |
|---|---|---|---|
{chr(10).join(lines)}

{verdict}"""


def chunks(prefill_chunk: int | None, prefill_layout: str | None) -> str:
    """How an evaluation was prefilled, in words that go on a sentence."""
    if not prefill_chunk:
        return ""
    # Earlier versions had one layout and no name for it.
    kept = (
        "only the sink stays"
        if prefill_layout == "server"
        else "the sink and the recent tokens stay"
    )
    return f", prefilled in chunks of {prefill_chunk:,} tokens between which {kept} exact"


def _error_words(texts: int | None) -> str:
    if texts is None:  # evaluated by an earlier rotationzoo
        return "without standard errors"
    return (
        "one text, of which no standard error can be given"
        if texts == 1
        else f"± standard error over {texts} texts"
    )


def _with_error(value: float | None, error: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if error is None else f" ±{error:{form.removeprefix('+')}}")
