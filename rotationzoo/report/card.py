"""The model card, a README.md rendered from the manifest alone: how to use the artifact, what it
keeps, and only then what it is and where it comes from."""

import re
import shlex
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from rotationzoo.artifact.layout import tensor_name
from rotationzoo.artifact.manifest import Manifest
from rotationzoo.artifact.measured import ArmSummary, ExactSummary, Summary, arms_of
from rotationzoo.codec import int2
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.size import CONTEXT, EXACT_BITS, bits_per_element
from rotationzoo.figures import numbers, perplexity
from rotationzoo.geometry import cached_layers, geometry_from_json
from rotationzoo.recipe import Recipe
from rotationzoo.report import tables
from rotationzoo.report.commands import model_title, name_in_commands, reproduce_command
from rotationzoo.report.tables import Table
from rotationzoo.rotations import LATENT
from rotationzoo.words import counted, sentence

_DATA_SET = re.compile(r"[\w.-]+/[\w.-]+")  # on a hub; files have other names
_LIBRARIES = ("torch", "transformers", "python")
_WORDS = (counted, tables.describe_prefill, numbers, perplexity, sentence, tensor_name)


def render_card(manifest: Manifest, repo: str | None = None) -> str:
    """The README.md of an artifact, with YAML front matter that the hubs understand. `repo`: the
    repository that it is published to, from which its first command pulls."""
    recipe = Recipe.model_validate(manifest.recipe)
    layers = cached_layers(geometry_from_json([layer.model_dump() for layer in manifest.geometry]))
    title = f"2-bit KV cache rotations for {model_title(manifest.model)}"
    bits, sizes = list[float](), list[list[str]]()
    for name, format in int2.FORMATS.items():
        value = bits_per_element(layers, CacheLayout.of_recipe(recipe, format))
        bits.append(value)
        sizes.append([name, format.metadata, f"{value:.2f}", f"{EXACT_BITS / value:.1f} times"])
    versions = manifest.versions.model_dump()
    libraries = [f"{name} {versions[name]}" for name in _LIBRARIES if name in versions]
    sides = LATENT if manifest.has_latents else "{key,value}"
    files = sorted(manifest.files.items())
    checksums = [[name, f"{file.size:,}", f"`{file.sha256}`"] for name, file in files]
    return _template().render(
        **_evaluation_values(manifest),
        manifest=manifest,
        recipe=recipe,
        repo=repo,
        layers=layers,
        sides=sides,
        title=title,
        front_matter=_front_matter(manifest, title),
        name=name_in_commands(manifest.model),
        first_command=_first_command(manifest, repo),
        command=reproduce_command(manifest),
        context=f"{CONTEXT:,}",
        bits=[f"{value:.2f}" for value in sorted(bits)],
        sizes=Table("size", ["format", "scale, offset", "bits", "smaller than bfloat16"], sizes),
        serving=describe_serving(manifest, recipe),
        libraries=", ".join(libraries),
        checksums=Table("files", ["file", "bytes", "sha256"], checksums),
    )


def template_environment(folders: Iterable[Path] = (), **options: Any) -> Environment:
    """The templates of this package and of the `folders`, with further `options` of jinja."""
    loader = FileSystemLoader([*folders, Path(__file__).parent / "templates"])
    options |= {"loader": loader, "undefined": StrictUndefined}
    return Environment(trim_blocks=True, lstrip_blocks=True, **options)


@cache
def _template() -> Template:
    environment = template_environment(keep_trailing_newline=True)
    environment.globals |= {word.__name__: word for word in _WORDS}
    return environment.get_template("card.md.jinja")


def _evaluation_values(manifest: Manifest) -> dict[str, Any]:
    """What the card says of an evaluation, if there is one. `asked`: the artifact's arm."""
    evaluation = manifest.metrics.evaluation
    if evaluation is None:
        return {"evaluation": None}
    # Arms that decide nothing are asked fewer questions.
    arms = arms_of(evaluation.arms, manifest.rotations_sha256)
    exact, most = evaluation.exact, max(arms, key=_count_questions, default=None)
    all_arms, asked = evaluation.arms.items(), _count_questions(exact)
    alike = {name: arm for name, arm in all_arms if _count_questions(arm) == asked}
    return {
        "evaluation": evaluation,
        "recall": tables.recall_tables(exact, alike),
        "costs": tables.cost_table(evaluation.arms),
        "about_arms": tables.describe_arms(evaluation.arms.values()),
        "asked": most if most and _count_questions(most) else None,
    }


def _count_questions(arm: ArmSummary | ExactSummary) -> int:
    return arm.all_tasks.questions if arm.all_tasks else 0


def _first_command(manifest: Manifest, repo: str | None) -> str:
    model = name_in_commands(manifest.model)
    if repo is not None:
        return shlex.join(["rotationzoo", "pull", manifest.model.id, "--repo", repo])
    prompt = "" if model == "demo" else " --prompt TEXT"
    return f"rotationzoo generate {model} --rotations FOLDER{prompt}"


def describe_serving(manifest: Manifest, recipe: Recipe) -> str:
    """What to serve the rotations with."""
    ratios = f"clip ratios {recipe.key_clip:g} for keys and {recipe.value_clip:g} for values"
    if manifest.has_latents:
        ratios = f"a clip ratio of {recipe.clip(LATENT):g} for latents"
    return f"{ratios}, the first {recipe.sink} and the last {recipe.recent} tokens exact"


# ---- what hubs read


def _front_matter(manifest: Manifest, title: str) -> str:
    """YAML of what hubs show and search: the base model, license, data sets, and results."""
    front: dict[str, Any] = {
        "library_name": "rotationzoo",
        "tags": ["kv-cache", "2-bit", "rotation"],
    }
    model = manifest.model
    # Only a hub repository may be named as the base model: the hubs link to it.
    if "/" in model.id and model.revision:
        front |= {"base_model": model.id, "base_model_relation": "quantized"}
    if model.license:
        front["license"] = model.license
    text = manifest.calibration
    if text and manifest.imported is None and _DATA_SET.fullmatch(text.source):
        front["datasets"] = [text.source]
    evaluation = manifest.metrics.evaluation
    if evaluation is not None:
        arms = arms_of(evaluation.arms, manifest.rotations_sha256)
        front["model-index"] = [{"name": title, "results": _results(evaluation, arms)}]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()


def _results(evaluation: Summary, arms: list[ArmSummary]) -> list[dict[str, Any]]:
    """The results of the artifact's `arms` as hubs take them: one entry for the answers, one for
    perplexity."""
    exact, answers = evaluation.exact, list[dict[str, Any]]()
    cached: list[tuple[str, Any]] = [("exact cache", exact)]
    cached += [(f"2-bit cache, {arm.name}", arm) for arm in arms]
    perplexities = [_metric("perplexity", name, each.perplexity) for name, each in cached]
    for name, each in cached:
        alike = _count_questions(each) == _count_questions(exact)
        if exact.all_tasks is not None and each.all_tasks is not None and arms and alike:
            # More answers than the exact model's are chance, and no merit of 2 bits.
            share = min(each.all_tasks.share, exact.all_tasks.share)
            answers.append(_metric("accuracy", name, share))
    text = evaluation.text.source
    results = []
    for name, metrics in ((f"questions about a context of {text}", answers), (text, perplexities)):
        if metrics:
            dataset = {"type": text, "name": name}
            result = {"task": {"type": "text-generation"}, "dataset": dataset, "metrics": metrics}
            results.append(result)
    return results


def _metric(kind: str, name: str, value: float) -> dict[str, Any]:
    return {"type": kind, "name": name, "value": round(value, 4)}
