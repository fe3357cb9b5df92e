"""The model card, a README.md rendered from the manifest alone: how to use the artifact, what it
keeps, and only then what it is and where it comes from."""

import shlex

from rotationzoo.artifact.card_front import front_matter
from rotationzoo.artifact.card_limits import limits_section
from rotationzoo.artifact.card_matrices import matrices_section
from rotationzoo.artifact.card_results import answers_section, evaluation_section
from rotationzoo.artifact.card_source import provenance_section, reproduction_section
from rotationzoo.artifact.manifest import File, Manifest
from rotationzoo.artifact.reproduce import name_in_commands
from rotationzoo.codec import int2
from rotationzoo.model.geometry import cached_layers, geometry_from_json
from rotationzoo.recipe import Recipe
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.size import CONTEXT, bits_per_element

_ANSWERS = "answers.png", "Questions answered from a 2-bit cache"
_SPECTRA = "spectra.png", "Spectra of the statistics, layer by layer"


def render_card(manifest: Manifest, repo: str | None = None) -> str:
    """The README.md of an artifact, with YAML front matter that the hubs understand.

    `repo`: the repository that it is published to, from which its first command pulls.
    """
    recipe = Recipe.model_validate(manifest.recipe)
    cached = cached_layers(geometry_from_json([layer.model_dump() for layer in manifest.geometry]))
    title = f"2-bit KV cache rotations for {_title(manifest)}"
    bits = [
        bits_per_element(cached, CacheLayout.of_recipe(recipe, format))
        for format in int2.FORMATS.values()
    ]
    evaluation = manifest.metrics.evaluation
    return f"""---
{front_matter(manifest, title)}
---

# {title}

    {_first_command(manifest, repo)}

Orthogonal matrices for a key/value cache that is stored in 2 bits ({min(bits):.2f} to \
{max(bits):.2f} an element at {CONTEXT:,} tokens):
keys and values are multiplied by them first.{"" if repo else " FOLDER is where this file is."}

{answers_section(evaluation)}{_picture(manifest.files, *_ANSWERS)}\
{matrices_section(manifest, recipe, cached)}
{evaluation_section(evaluation)}{limits_section(manifest, recipe)}
{reproduction_section(manifest, recipe)}{provenance_section(manifest)}
{_picture(manifest.files, *_SPECTRA)}## Recipe

```yaml
{recipe.yaml().strip()}
```

## Files

| file | bytes | sha256 |
|---|---|---|
{_checksums(manifest.files)}
"""


def _title(manifest: Manifest) -> str:
    model = manifest.model
    unnamed = model.config_sha256 is None or model.id == "MODEL"
    return "a model that nobody has named" if unnamed else model.id


def _first_command(manifest: Manifest, repo: str | None) -> str:
    """What somebody who reads the card does first."""
    model = name_in_commands(manifest.model)
    if repo is not None:
        return shlex.join(["rotationzoo", "pull", manifest.model.id, "--repo", repo])
    prompt = "" if model == "demo" else " --prompt TEXT"
    return f"rotationzoo generate {model} --rotations FOLDER{prompt}"


def _picture(files: dict[str, File], name: str, words: str) -> str:
    return f"![{words}]({name})\n\n" if name in files else ""


def _checksums(files: dict[str, File]) -> str:
    rows = []
    for name, file in sorted(files.items()):
        rows.append(f"| {name} | {file.size:,} | `{file.sha256}` |")
    return "\n".join(rows)
