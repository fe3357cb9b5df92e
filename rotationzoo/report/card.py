"""The model card, a README.md rendered from the manifest, and the commands that it names."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rotationzoo.artifact.layout import tensor_name
from rotationzoo.artifact.manifest import Manifest, Model
from rotationzoo.artifact.measured import ArmSummary, Conditions, ExactSummary, Measured, arms_of
from rotationzoo.artifact.scores import FLOOR, Decision
from rotationzoo.budget import MOST
from rotationzoo.codec import int2
from rotationzoo.codec.engine_needs import DEFAULT, engines_for, find_engine
from rotationzoo.codec.size import CONTEXT, EXACT_BITS, bits_per_element
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import cached_layers, geometry_from_json
from rotationzoo.recall.questions import TASKS
from rotationzoo.recipe import Recipe, loading
from rotationzoo.report import tables
from rotationzoo.words import counted, number, numbers, sentence

FOLDER = "FOLDER"
"""Stands for the folder of an artifact."""
RECIPE_FILE = "recipe.yaml"
_RUN_KEYS = ("batch", "device_map", "max_memory")
_USUAL_BITS = 3.0  # an element, where an evaluation does not say it


def name_in_commands(model: Model) -> str:
    """The model's name in example commands: a hub id, `demo`, or `MODEL` for a local folder."""
    return model.id if model.revision or model.id == "demo" else "MODEL"


def model_title(model: Model) -> str:
    """The model's name in titles."""
    return "an unnamed model" if model.id == "MODEL" else model.id


def _asked_options(measured: Conditions) -> list[str]:
    """The options of an evaluation that asks the same tasks at the same lengths."""
    names, lengths = measured.tasks.names, map(str, measured.tasks.lengths)
    words = ["--lengths", ",".join(lengths)]
    return words if len(names) == len(TASKS) else ["--tasks", ",".join(names), *words]


def decided_words(
    decision: Decision,
    model: Sequence[str],
    artifact: str,
    served: Sequence[str] = (),
    asked: Sequence[str] = (),
) -> list[str] | None:
    """The command, without `rotationzoo`, that a decision calls for before the artifact is used, or
    None. `model`: the words that name it; `served`: the option for an engine; `asked`: the options
    that repeat the questions."""
    evaluate = ["evaluate", *model, artifact, *served, *asked]
    if decision.floor not in (None, FLOOR):
        evaluate += ["--keep", f"{100 * decision.floor:g}"]
    if decision.action == "ask" and decision.more_questions:
        return [*evaluate, "--questions", str(decision.more_questions), "--seed", "1", "--save"]
    if decision.action == "refuse":
        takes_budget = not served or find_engine(served[-1]).budget
        bits = round(2 * (decision.bits or _USUAL_BITS)) / 2 + 0.5
        if takes_budget and bits <= MOST:
            return ["calibrate", *model, *served, "--bits", f"{bits:g}"]
        return [*evaluate, "--rivals", "fp8"]
    return None


def usual_engine(manifest: Manifest) -> str:
    """The engine to name if none was chosen."""
    is_gguf = manifest.model.id.endswith(".gguf")
    return DEFAULT if is_gguf else engines_for(manifest.cached.sides)[0]


def use_commands(
    manifest: Manifest, measured: Measured | None, decision: Decision | None
) -> list[str]:
    """The commands after a decision, for an artifact in `FOLDER` and the measured engine."""
    name, engine = [manifest.model.id], measured and measured.engine
    named = engine or usual_engine(manifest)
    prompt = [] if name == ["demo"] else ["--file", "LONG.txt"]
    generate = ["generate", *name, "--rotations", FOLDER, *prompt]
    served = ["--for", engine] if engine else []
    words = None
    if measured and decision:
        words = decided_words(decision, name, FOLDER, served, _asked_options(measured))
    if decision is None or decision.action == "ask":
        commands = [words or ["evaluate", *name, FOLDER, "--for", named, "--save"], generate]
    elif words:
        commands = [words]
    elif decision.action == "nothing":
        shorter = ["evaluate", *name, FOLDER, *served, "--lengths", "512", "--save"]
        commands = [shorter, [*generate, "--compare"]]
    elif named == "vllm":  # for which nothing is exported
        commands = [["serve", *name, "--rotations", FOLDER], generate]
    else:
        commands = [["export", FOLDER, "--for", named], generate]
    return [shlex.join(["rotationzoo", *words]) for words in commands]


def replace_words(command: str, named: Mapping[str, str]) -> str:
    """A command with this machine's names in place of `FOLDER` and the like."""
    return shlex.join(named.get(word, word) for word in shlex.split(command))


def reproduce_command(manifest: Manifest) -> str | None:
    """The `calibrate` command that makes the same bytes; None for imported files. It reads a recipe
    that is not a preset from `RECIPE_FILE`."""
    if manifest.imported is not None:
        return None
    model, recipe = manifest.model, Recipe.model_validate(manifest.recipe)
    revision = ["--revision", model.revision] if model.revision else []
    run = _run_words(manifest.identity, manifest.run.device, recipe.data.usual_batch)
    preset = loading.PRESETS.get(recipe.name)
    named = recipe.name if preset and preset.hash == recipe.hash else RECIPE_FILE
    words = ["calibrate", name_in_commands(model), *revision, "--recipe", named, *run]
    return shlex.join(["rotationzoo", *words])


def _run_words(identity: dict[str, Any], device: str | None, batch: int) -> Iterator[str]:
    """The options of the run that another machine may not have by default; none if no model ran."""
    if "batch" not in identity:
        return
    for key in _RUN_KEYS:
        value = identity.get(key)
        if value is not None and (key != "batch" or str(value) != str(batch)):
            yield from (f"--{key.replace('_', '-')}", str(value))
    on_cpu = str(device).endswith(" CPU")  # otherwise the name of a GPU
    if on_cpu:
        yield from ("--device", "cpu")
    # The type is `torch.float32` or the like, or `auto` for the checkpoint's own.
    _, torch, dtype = str(identity.get("dtype")).partition("torch.")
    if torch and not (on_cpu and dtype == "float32"):
        yield from ("--dtype", dtype)


PAPER = "2605.17757"  # on arXiv: the method's
_DATA_SET = re.compile(r"[\w.-]+/[\w.-]+")  # on a hub; files have other names
_TURN = re.compile("[\u202a-\u202e\u2066-\u2069]")  # bidi controls
_LIBRARIES = ("torch", "transformers", "python")
_WORDS = counted, model_title, name_in_commands, number, numbers, sentence, shlex.quote, tensor_name
"""The functions that templates call."""


def render_card(manifest: Manifest, repo: str | None = None) -> str:
    """The README.md of an artifact. `repo`: where its first command pulls from."""
    recipe = Recipe.model_validate(manifest.recipe)
    layers = cached_layers(geometry_from_json([layer.model_dump() for layer in manifest.geometry]))
    sizes = {}
    for name, format in int2.FORMATS.items():
        bits = bits_per_element(layers, CacheLayout.of_recipe(recipe, format))
        sizes[name] = {"metadata": format.metadata, "bits": bits, "smaller": EXACT_BITS / bits}
    versions = manifest.versions.model_dump()
    libraries = [f"{name} {versions[name]}" for name in _LIBRARIES if name in versions]
    return render(
        "card.md.jinja",
        **_evaluation_values(manifest),
        manifest=manifest,
        recipe=recipe,
        repo=repo,
        layers=layers,
        front_matter=_front_matter(manifest),
        command=reproduce_command(manifest),
        paper=PAPER,
        sizes=sizes,
        libraries=", ".join(libraries),
    )


def recipe_lines(recipe: Recipe) -> str:
    """The recipe's YAML file, based on the recipe `oscar`."""
    return yaml.safe_dump({"extends": "oscar", **recipe.model_dump()}, sort_keys=False).strip()


def render(template: str, **values: Any) -> str:
    """The text of a template: Markdown, or HTML, which escapes everything but `Markup`."""
    text: str = _environment("html" in template).get_template(template).render(**values)
    return _TURN.sub("\ufffd", text)


@cache
def _environment(is_html: bool) -> Environment:
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
    """The evaluation, if any; the arms that were asked as many questions as the exact model (those
    that decide nothing are asked fewer); and the artifact's arm with the most questions."""
    evaluation = manifest.metrics.evaluation
    if evaluation is None:
        return {"evaluation": None}
    arms, questions = evaluation.arms, _count_questions(evaluation.exact)
    compared = {name: arm for name, arm in arms.items() if _count_questions(arm) == questions}
    asked = [arm for arm in arms_of(arms, manifest.rotations_sha256) if _count_questions(arm)]
    most = max(asked, key=_count_questions, default=None)
    return {"evaluation": evaluation, "compared": compared, "asked": most}


def _count_questions(arm: ArmSummary | ExactSummary) -> int:
    return arm.all_tasks.questions if arm.all_tasks else 0


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
