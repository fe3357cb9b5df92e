"""The model card: what an artifact is, in words, from its manifest alone."""

from typing import Any

import yaml

from rotationzoo import int2
from rotationzoo.artifact import clip_ratios
from rotationzoo.geometry import Geometry, cached_layers, geometry_from_json
from rotationzoo.recipe import SELF, Recipe

CONTEXT = 131072  # tokens at which bits per element are stated


def render(manifest: dict[str, Any]) -> str:
    """The README.md of an artifact, with front matter that the hubs understand."""
    model, recipe = manifest["model"], Recipe.model_validate(manifest["recipe"])
    name = "MODEL" if model["config_sha256"] is None else model["id"]
    cached = cached_layers(geometry_from_json(manifest["geometry"]))
    front: dict[str, Any] = {"library_name": "rotationzoo", "tags": ["kv-cache", "2-bit", "rotation"]}
    if "/" in model["id"] and model["revision"]:
        front |= {"base_model": model["id"], "base_model_relation": "quantized"}
    if model.get("license"):
        front["license"] = model["license"]
    matrices = "one rotation per KV head" if recipe.pooling == "head" else "one rotation per layer"
    data = manifest["calibration"]
    text = (
        f"{data['tokens']:,} tokens of {_source(data)} in {data['rows']} rows (sha256 of the ids `{data['fingerprint']}`)"
        if data
        else "none: the rotation does not depend on data"
    )
    made = f"Made by rotationzoo {manifest['versions']['rotationzoo']} with the recipe `{recipe.name}`"
    if imported := manifest.get("imported"):
        said = ", ".join(f"{name} {value}" for name, value in imported["calibration"].items()) or "nothing"
        text = f"not known to rotationzoo; the imported files say: {said}"
        made = f"Imported by rotationzoo {manifest['versions']['rotationzoo']}, matrices unchanged, from\n"
        made += ", ".join(f"`{file['name']}` (sha256 `{file['sha256']}`)" for file in imported["files"].values())
    title = "a model that nobody has named" if name == "MODEL" else name
    if not model["revision"] and name != "demo":
        name = "MODEL"  # a folder of somebody's machine
    stored_key = "(k - mean) R_K" if recipe.center_keys else "k R_K"
    stored_value, output = ("(v - mean) R_V", "R_V^T` plus `mean") if recipe.center_values else ("v R_V", "R_V^T")
    clips = clip_ratios(manifest)
    groups = f"quantization groups of {recipe.group_size} channels" if recipe.group_size else "one quantization group a head"
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# 2-bit KV cache rotations for {title}

Orthogonal matrices to multiply keys and values with before they are stored in 2 bits: {matrices}, key and value, in
{len(cached)} layers. {made}.

* Model: {_model(model)}
* Calibration text: {text}
* Largest `|R R^T - I|`: {manifest["metrics"]["orthogonality_error"]:.1e}
{"".join(f"* Note: {note}{chr(10)}" for note in manifest.get("notes", []))}
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
{_validation(manifest["metrics"].get("validation"))}{_evaluation(manifest["metrics"].get("evaluation"))}
{_pictures(manifest["files"])}## Recipe

```yaml
{recipe.yaml().strip()}
```

## Files

| file | bytes | sha256 |
|---|---|---|
{_checksums(manifest["files"])}
"""


def _source(data: dict[str, Any]) -> str:
    if data["source"] != SELF:
        return f"`{data['source']}`"
    return f"prompts of `{data['prompts']}` and of what the model made of them ({data['sampling']}),"


def _model(model: dict[str, Any]) -> str:
    if model["config_sha256"] is None:
        return "nobody has said which"
    return f"`{model['id']}`, revision `{model['revision'] or 'local folder'}`, {model['architecture']}"


def _pictures(files: dict[str, Any]) -> str:
    shown = {"spectra.png": "Spectra of the statistics, layer by layer", "error_by_layer.png": "Error by layer"}
    lines = [f"![{words}]({name})" for name, words in shown.items() if name in files]
    return "## Pictures\n\n" + "\n".join(lines) + "\n\n" if lines else ""


def _checksums(files: dict[str, Any]) -> str:
    return "\n".join(f"| {name} | {file['size']:,} | `{file['sha256']}` |" for name, file in sorted(files.items()))


def bits_per_element(geometry: Geometry, group_size: int | None, form: int2.Format, sink: int, recent: int) -> float:
    """Bits that an element of a 2-bit cache costs at `CONTEXT` tokens, mean over all that the model caches."""
    sizes = [(dim, layer.kv_heads * dim) for layer in cached_layers(geometry) for dim in (layer.key_dim, layer.value_dim)]
    bits = (
        count * int2.bits_per_element(dim, group_size, form, context=CONTEXT, sink=sink, recent=recent) for dim, count in sizes
    )
    return sum(bits) / sum(count for _, count in sizes)


def _sizes(recipe: Recipe, geometry: Geometry) -> str:
    rows = []
    for name, form in int2.FORMATS.items():
        bits = bits_per_element(geometry, recipe.group_size, form, recipe.sink, recipe.recent)
        rows.append(f"| {name} | {str(form.metadata).removeprefix('torch.')} | {bits:.2f} | {16 / bits:.1f} times |")
    return "\n".join(rows)


def _snippet(recipe: Recipe, layer: int) -> str:
    """Python that rotates one layer's queries, keys and values as they are served, and the output back."""
    head = "head" if recipe.pooling == "head" else "0"
    lines = ["from safetensors.torch import load_file", "", 'tensors = load_file("rotations.safetensors")']
    for side in ("key", "value"):
        lines.append(f'{side} = tensors["layers.{layer}.{side}.rotation"]')
        if side in recipe.centered:
            lines.append(f'{side}_mean = tensors["layers.{layer}.{side}.mean"]  # [KV heads, D]')
    stored = {side: f"({side[0]} - {side}_mean[head])" if side in recipe.centered else side[0] for side in ("key", "value")}
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


def _validation(found: dict[str, Any] | None) -> str:
    if found is None:
        return "\nThe CUDA reference has not been run on these matrices.\n"
    if not found["on_gpu"]:
        return "\nNot validated on a GPU: only the codec's definition was run on these matrices, on a CPU.\n"
    equal = "bit-equal to" if found["codes_equal"] and found["dequantized_equal"] else "NOT equal to"
    return f"""
## Validation

On {found["device"]}, `int2.cu` gave codes and values {equal} the definition for {found["rows"]:,} rows of all layers and heads
(`validation.json`).
"""


def _evaluation(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    measures = {"perplexity_increase": "+.2%", "attention_kl": ".4f", "output_error": ".3f"}
    lines = []
    for name, arm in found["arms"].items():
        errors = arm.get("standard_error", {})
        cells = (_with_error(arm[key], errors.get(key), form) for key, form in measures.items())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    verdict = "".join(f"* {words}\n" for words in found.get("verdict", []))
    return f"""
## What it costs the model

Perplexity of the exact model on {found["tokens"]:,} tokens past the windows of `{found["text"]}`: {found["perplexity"]:.3f}.
With a 2-bit cache of the format {found["format"]} and windows {found["sink"]}/{found["recent"]}{chunks(found)},
{_error_words(found)}:

| rotation | perplexity | attention KL | error of the attention block |
|---|---|---|---|
{chr(10).join(lines)}

{verdict}"""


def chunks(measured: dict[str, Any]) -> str:
    """How an evaluation was prefilled, in words that go on a sentence."""
    if not measured.get("prefill_chunk"):
        return ""
    # Earlier versions had one layout and no name for it.
    kept = "only the sink stays" if measured.get("prefill_layout") == "server" else "the sink and the recent tokens stay"
    return f", prefilled in chunks of {measured['prefill_chunk']:,} tokens between which {kept} exact"


def _error_words(found: dict[str, Any]) -> str:
    texts = found.get("texts")
    if texts is None:  # evaluated by an earlier rotationzoo
        return "without standard errors"
    return "one text, of which no standard error can be given" if texts == 1 else f"± standard error over {texts} texts"


def _with_error(value: float | None, error: float | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if error is None else f" ±{error:{form.removeprefix('+')}}")
