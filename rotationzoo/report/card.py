"""The model card, a README.md rendered from the manifest: how to use the artifact, what it keeps,
and only then what it is and where it comes from."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rotationzoo.artifact.layout import tensor_name
from rotationzoo.artifact.manifest import Manifest
from rotationzoo.artifact.measured import ArmSummary, ExactSummary, arms_of
from rotationzoo.codec import int2
from rotationzoo.codec.size import CONTEXT, EXACT_BITS, bits_per_element
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import cached_layers, geometry_from_json
from rotationzoo.recipe import Recipe
from rotationzoo.report import tables
from rotationzoo.report.commands import model_title, name_in_commands, reproduce_command
from rotationzoo.words import counted, numbers, perplexity, sentence

PAPER = "2605.17757"  # on arXiv: the method's
_DATA_SET = re.compile(r"[\w.-]+/[\w.-]+")  # on a hub; files have other names
TURN = re.compile("[\u202a-\u202e\u2066-\u2069]")  # what turns the direction of writing
_LIBRARIES = ("torch", "transformers", "python")
_WORDS = (
    counted,
    model_title,
    name_in_commands,
    numbers,
    perplexity,
    sentence,
    shlex.quote,
    tensor_name,
)
"""The functions that templates call."""


def render_card(manifest: Manifest, repo: str | None = None) -> str:
    """The README.md of an artifact, with the YAML front matter of the hubs. `repo`: the repository
    that its first command pulls from."""
    recipe = Recipe.model_validate(manifest.recipe)
    layers = cached_layers(geometry_from_json([layer.model_dump() for layer in manifest.geometry]))
    title = f"2-bit KV cache rotations for {model_title(manifest.model)}"
    sizes = {}
    for name, format in int2.FORMATS.items():
        bits = bits_per_element(layers, CacheLayout.of_recipe(recipe, format))
        sizes[name] = {"metadata": format.metadata, "bits": bits, "smaller": EXACT_BITS / bits}
    sides = ",".join(manifest.cached.sides)
    versions = manifest.versions.model_dump()
    libraries = [f"{name} {versions[name]}" for name in _LIBRARIES if name in versions]
    card = template_environment().get_template("card.md.jinja")
    text: str = card.render(
        **_evaluation_values(manifest),
        manifest=manifest,
        recipe=recipe,
        repo=repo,
        layers=layers,
        sides=f"{{{sides}}}" if "," in sides else sides,
        title=title,
        front_matter=_front_matter(manifest),
        command=reproduce_command(manifest),
        paper=PAPER,
        sizes=sizes,
        libraries=", ".join(libraries),
    )
    return TURN.sub("\ufffd", text)


def recipe_lines(recipe: Recipe) -> str:
    """The lines of the recipe's YAML file. What it leaves out is as in the recipe `oscar`."""
    return yaml.safe_dump({"extends": "oscar", **recipe.model_dump()}, sort_keys=False).strip()


@cache
def template_environment(is_html: bool = False) -> Environment:
    """The templates of this package: Markdown, or HTML, which escapes all but `Markup`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=is_html,
        keep_trailing_newline=not is_html,
    )
    environment.globals |= {word.__name__: word for word in _WORDS}
    environment.globals |= {"CONTEXT": CONTEXT, "tables": tables, "recipe_lines": recipe_lines}
    return environment


def _evaluation_values(manifest: Manifest) -> dict[str, Any]:
    """The evaluation, if there is one, its arms that were asked as much as the exact model, and the
    artifact's arm with the most questions."""
    evaluation = manifest.metrics.evaluation
    if evaluation is None:
        return {"evaluation": None}
    # Arms that decide nothing are asked fewer questions.
    arms, questions = evaluation.arms, _count_questions(evaluation.exact)
    alike = {name: arm for name, arm in arms.items() if _count_questions(arm) == questions}
    asked = [arm for arm in arms_of(arms, manifest.rotations_sha256) if _count_questions(arm)]
    most = max(asked, key=_count_questions, default=None)
    return {"evaluation": evaluation, "alike": alike, "asked": most}


def _count_questions(arm: ArmSummary | ExactSummary) -> int:
    return arm.all_tasks.questions if arm.all_tasks else 0


# ---- what hubs read


def _front_matter(manifest: Manifest) -> str:
    """The YAML that hubs show and search: base model, license and data sets."""
    front: dict[str, Any] = {"library_name": "rotationzoo"}
    front["tags"], model = ["kv-cache", "2-bit", "rotation", f"arxiv:{PAPER}"], manifest.model
    # The hubs link to the base model.
    if "/" in model.id and model.revision:
        front |= {"base_model": model.id, "base_model_relation": "quantized"}
    if model.license:
        front["license"] = model.license
    text = manifest.calibration
    if text and manifest.imported is None and _DATA_SET.fullmatch(text.source):
        front["datasets"] = [text.source]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()
