"""The model card: what an artifact is, in words, from its manifest alone."""

from typing import Any

import yaml

from rotationzoo.recipe import Recipe


def render(manifest: dict[str, Any]) -> str:
    """The README.md of an artifact, with front matter that the hubs understand."""
    model, recipe = manifest["model"], Recipe.model_validate(manifest["recipe"])
    cached = [layer for layer in manifest["geometry"] if layer["owner"] == layer["index"]]
    front: dict[str, Any] = {"library_name": "rotationzoo", "tags": ["kv-cache", "2-bit", "rotation"]}
    if "/" in model["id"] and model["revision"]:
        front["base_model"] = model["id"]
    matrices = "one rotation per KV head" if recipe.pooling == "head" else "one rotation per layer"
    data = manifest["calibration"]
    text = (
        f"{data['tokens']:,} tokens of `{data['source']}` in {data['rows']} rows (sha256 of the ids `{data['fingerprint']}`)"
        if data
        else "none: the rotation does not depend on data"
    )
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# 2-bit KV cache rotations for {model["id"]}

Orthogonal matrices to multiply keys and values with before they are stored in 2 bits: {matrices}, key and value, in
{len(cached)} layers. Made by rotationzoo {manifest["versions"]["rotationzoo"]} with the recipe `{recipe.name}`.

* Model: `{model["id"]}`, revision `{model["revision"] or "local folder"}`, {model["architecture"]}
* Calibration text: {text}
* Largest `|R R^T - I|`: {manifest["metrics"]["orthogonality_error"]:.1e}

Row vectors, after RoPE: `q R_K`, `k R_K`, `v R_V`, and the attention output times `R_V^T`. Scores and outputs are unchanged
before quantization. In `rotations.safetensors`, `layers.N.key.rotation` and `layers.N.value.rotation` are float32
`[KV heads, D, D]`, with a first dimension of 1 when the heads share one; N counts all layers of the model.

## Recipe

```yaml
{recipe.yaml().strip()}
```
"""
