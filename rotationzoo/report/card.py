"""The model card, a README.md rendered from the manifest alone: how to use the artifact, what it
keeps, and only then what it is and where it comes from."""

import re
import shlex
from typing import Any

import yaml

from rotationzoo.artifact.manifest import Calibration, File, Imported, Manifest
from rotationzoo.artifact.measured import ArmSummary, Summary, arms_of, plain_arm
from rotationzoo.codec import int2
from rotationzoo.model.geometry import cached_layers, geometry_from_json
from rotationzoo.recipe import Recipe
from rotationzoo.report.card_use import matrices_section
from rotationzoo.report.commands import (
    RECIPE_FILE,
    model_title,
    name_in_commands,
    reproduce_command,
)
from rotationzoo.report.conditions import describe_arms, describe_prefill
from rotationzoo.report.tables import Table, cost_table, recall_tables
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.size import CONTEXT, bits_per_element
from rotationzoo.words import counted, numbers, perplexity, sentence

UNRECORDED = "an unrecorded device"
_ANSWERS = "answers.png", "Questions answered from a 2-bit cache"
_DATA_SET = re.compile(r"[\w.-]+/[\w.-]+")
_LIBRARIES = ("torch", "transformers", "python")


def render_card(manifest: Manifest, repo: str | None = None) -> str:
    """The README.md of an artifact, with YAML front matter that the hubs understand.

    `repo`: the repository that it is published to, from which its first command pulls.
    """
    recipe = Recipe.model_validate(manifest.recipe)
    cached = cached_layers(geometry_from_json([layer.model_dump() for layer in manifest.geometry]))
    title = f"2-bit KV cache rotations for {model_title(manifest.model)}"
    bits = [
        bits_per_element(cached, CacheLayout.of_recipe(recipe, format))
        for format in int2.FORMATS.values()
    ]
    evaluation = manifest.metrics.evaluation
    return f"""---
{_front_matter(manifest, title)}
---

# {title}

    {_first_command(manifest, repo)}

Orthogonal matrices for a key/value cache that is stored in 2 bits ({min(bits):.2f} to \
{max(bits):.2f} an element at {CONTEXT:,} tokens):
keys and values are multiplied by them first.{"" if repo else " FOLDER is where this file is."}

{_answers_section(evaluation)}{_picture(manifest.files, *_ANSWERS)}\
{matrices_section(manifest, recipe, cached)}
{_cost_section(evaluation)}{_limits_section(manifest, recipe)}
{_reproduction_section(manifest, recipe)}{_provenance_section(manifest)}
## Recipe

```yaml
{recipe.yaml().strip()}
```

## Files

{_checksums(manifest.files).markdown()}
"""


def _first_command(manifest: Manifest, repo: str | None) -> str:
    """The first command that a reader of the card runs."""
    model = name_in_commands(manifest.model)
    if repo is not None:
        return shlex.join(["rotationzoo", "pull", manifest.model.id, "--repo", repo])
    prompt = "" if model == "demo" else " --prompt TEXT"
    return f"rotationzoo generate {model} --rotations FOLDER{prompt}"


def _picture(files: dict[str, File], name: str, words: str) -> str:
    return f"![{words}]({name})\n\n" if name in files else ""


def _checksums(files: dict[str, File]) -> Table:
    rows = []
    for name, file in sorted(files.items()):
        rows.append([name, f"{file.size:,}", f"`{file.sha256}`"])
    return Table("files", ["file", "bytes", "sha256"], rows)


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
    if (names := _data_sets(manifest.calibration)) and manifest.imported is None:
        front["datasets"] = names
    evaluation = manifest.metrics.evaluation
    if evaluation is not None:
        arms = arms_of(evaluation.arms, manifest.rotations_sha256)
        front["model-index"] = [{"name": title, "results": _results(evaluation, arms)}]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()


def _data_sets(text: Calibration | None) -> list[str]:
    """The data sets of a hub that calibration read: names such as `owner/name`, and no files."""
    if text is None:
        return []
    return [text.source] if _DATA_SET.fullmatch(text.source) else []


def _results(evaluation: Summary, arms: list[ArmSummary]) -> list[dict[str, Any]]:
    """The results of the artifact's `arms` as hubs take them: one entry for the answers, one for
    perplexity."""
    exact = evaluation.exact
    perplexities = [_metric("perplexity", "exact cache", exact.perplexity)]
    answers = []
    if exact.all_tasks is not None and arms:
        answers.append(_metric("accuracy", "exact cache", exact.all_tasks.share))
    for arm in arms:
        if arm.all_tasks is not None:
            words = f"2-bit cache, {arm.name}"
            # More answers than the exact model's are chance, and no merit of 2 bits.
            share = min(arm.all_tasks.share, exact.all_tasks.share) if exact.all_tasks else 0.0
            answers.append(_metric("accuracy", words, share))
        perplexities.append(_metric("perplexity", f"2-bit cache, {arm.name}", arm.perplexity))
    text = evaluation.text.source
    results = [_result(text, text, perplexities)]
    if answers:
        results.insert(0, _result(text, f"questions about a context of {text}", answers))
    return results


def _result(text: str, name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": text, "name": name},
        "metrics": metrics,
    }


def _metric(kind: str, name: str, value: float) -> dict[str, Any]:
    return {"type": kind, "name": name, "value": round(value, 4)}


# ---- results and limits


def _answers_section(evaluation: Summary | None) -> str:
    """The decision, and the tables of recall tasks with a sentence on what they are."""
    if evaluation is None:
        return ""
    exact = evaluation.exact
    decision = "".join(f"* {words}\n" for words in evaluation.verdict.words) + "\n"
    tables = recall_tables(exact.tasks, exact.all_tasks, evaluation.arms)
    if not tables:
        return decision
    hidden = f"{numbers(evaluation.tasks.lengths)} tokens of text"
    shown = "\n\n".join(table.markdown() for table in tables)
    return f"""{decision}Questions about statements hidden in {hidden}, read from the 2-bit
part of the cache: the share answered exactly (≥: no fewer than the exact model), and the mean log
probability of the right answers in nats, with standard errors over prompts; then task by task.

{shown}

"""


def _cost_section(evaluation: Summary | None) -> str:
    """The section on what the rotations and the baselines cost the model; empty without an
    evaluation."""
    if evaluation is None:
        return ""
    past = counted(evaluation.tokens, "token")
    windows = f"{evaluation.sink}/{evaluation.recent}"
    about = "".join(f"\n{sentence(words)}\n" for words in describe_arms(evaluation.arms.values()))
    return f"""## What it costs the model

Perplexity of the exact model on {past} past the windows of `{evaluation.text.source}`: \
{perplexity(evaluation.exact.perplexity)}.
With a 2-bit cache of the format {evaluation.format} and windows {windows}\
{describe_prefill(evaluation)},
{_describe_errors(evaluation.verdict.texts)}; bits are per cached element, exact tokens included, \
at {CONTEXT:,} tokens and at the length of the text:

{cost_table(evaluation.arms).markdown()}
{about}
"""


def _describe_errors(texts: int) -> str:
    if texts == 1:
        return "one text, of which no standard error can be given"
    return f"± standard error over {counted(texts, 'text')}"


def _limits_section(manifest: Manifest, recipe: Recipe) -> str:
    """The section on what the rotations are for, and what has not been measured of them."""
    points = [
        "For the weights of this model and revision alone. A fine-tuned model, or other attention "
        "settings, need rotations of their own."
    ]
    if recipe.needs_statistics and manifest.calibration is not None:
        points.append(
            f"Calibrated on rows of {recipe.data.length:,} tokens; text of another kind, or of "
            "another language, may be read less well."
        )
    if manifest.metrics.evaluation is None:
        model = name_in_commands(manifest.model)
        points.append(
            "What they cost the model has not been measured. To measure it, run: "
            f"`rotationzoo evaluate {model} FOLDER --save`."
        )
    else:
        points += _measured_points(manifest.metrics.evaluation, manifest.rotations_sha256)
    points.append(_kernel_point(manifest))
    lines = "\n".join(f"* {point}" for point in points)
    return f"## Limits\n\n{lines}\n"


def _measured_points(evaluation: Summary, identity: str) -> list[str]:
    arm = plain_arm(evaluation.arms, identity)
    points = []
    if arm is not None and arm.all_tasks is not None:
        points.append(
            f"Answers: {counted(arm.all_tasks.questions, 'question')} in prompts of "
            f"{numbers(evaluation.tasks.lengths)} tokens. Longer contexts, other tasks and long "
            "answers have not been measured."
        )
        unable = [name for name in evaluation.exact.tasks if name not in arm.tasks]
        if unable:
            points.append(f"The exact model itself cannot do: {', '.join(unable)}.")
    else:
        points.append("No questions about a context have been asked.")
    points.append(
        f"Measured in transformers, with a cache of the format {evaluation.format}. No "
        "engine has been measured, nor its speed."
    )
    return points


def _kernel_point(manifest: Manifest) -> str:
    validation = manifest.metrics.validation
    if validation is None:
        return "The CUDA reference has not been run on these matrices."
    if not validation.on_gpu:
        return (
            "Not validated on a GPU: only the codec's definition was run on these matrices, on a "
            "CPU."
        )
    all_equal = validation.codes_equal and validation.dequantized_equal
    equal = "bit-equal to" if all_equal else "NOT equal to"
    return (
        f"On {validation.device}, `int2.cu` gave codes and values {equal} the definition for "
        f"{validation.rows:,} rows of all layers and heads (`validation.json`)."
    )


# ---- where it comes from


def _reproduction_section(manifest: Manifest, recipe: Recipe) -> str:
    """The section with the command that writes the same bytes on a machine of the same kind with
    as many threads; empty for imported files."""
    command = reproduce_command(manifest)
    if command is None:
        return ""
    file = ""
    if RECIPE_FILE in command:
        file = f" Save the recipe below as {RECIPE_FILE} first."
    if recipe.needs_statistics:
        machine = "On a machine of the same kind, with as many threads and the same versions, it "
        machine += "writes these bytes"
        words = f"{machine}: the sha256 of `rotations.safetensors` is below.{file}"
    else:
        words = f"It reads no text, and writes these bytes wherever it runs.{file}"
    return f"""## How to make it again

    {command}

{words}

"""


def _provenance_section(manifest: Manifest) -> str:
    """The section on who made the artifact of what, and how to check it."""
    model = manifest.model
    lines = [_origin(manifest), f"Calibration text: {_describe_text(manifest)}"]
    if model.weights_fingerprint:
        lines.append(f"Weights of the model: fingerprint `{model.weights_fingerprint}`")
    lines.append(
        "Signature: `model.sig`, if it is here; `rotationzoo verify FOLDER --require-signature` "
        "says whose it is, and refuses an artifact without one"
    )
    points = "\n".join(f"* {line}" for line in lines)
    return f"## Provenance\n\n{points}\n"


def _origin(manifest: Manifest) -> str:
    version = f"rotationzoo {manifest.versions.rotationzoo}"
    if manifest.imported is None:
        name = manifest.recipe["name"]
        return f"Made by {version} with the recipe `{name}` {_describe_run(manifest)}"
    files = manifest.imported.files.values()
    sources = ", ".join(f"`{file.name}` (sha256 `{file.sha256}`)" for file in files)
    return f"Imported by {version}, matrices unchanged, from\n{sources}"


def _describe_run(manifest: Manifest) -> str:
    """The machine, the time, and the versions of the libraries."""
    run = manifest.run
    threads = manifest.identity.get("threads")
    with_threads = f" with {threads} threads" if threads else ""
    versions = manifest.versions.model_dump()
    names = ", ".join(f"{name} {versions[name]}" for name in _LIBRARIES if name in versions)
    return f"on {run.device or UNRECORDED}{with_threads}, in {run.seconds:.1f} s ({names})"


def _describe_text(manifest: Manifest) -> str:
    if manifest.imported is not None:
        said = _said_by_files(manifest.imported)
        return f"not known to rotationzoo; the imported files say: {said}"
    text = manifest.calibration
    if text is None:
        return "none: the rotation does not depend on data"
    amount = f"{counted(text.tokens, 'token')} of `{text.source}` in {counted(text.rows, 'row')}"
    return f"{amount} (sha256 of the ids `{text.fingerprint}`)"


def _said_by_files(imported: Imported) -> str:
    said = ", ".join(f"{name} {value}" for name, value in imported.calibration.items())
    return said or "nothing"
