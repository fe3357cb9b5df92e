"""The output of `calibrate --dry-run`: a few lines for people, or one JSON object."""

from dataclasses import replace
from typing import Any

from rotationzoo.calibration.calibrate import read_text
from rotationzoo.calibration.plan import Job, Plan, plan
from rotationzoo.cli.next_steps import typed_words
from rotationzoo.cli.output import Output, say
from rotationzoo.codec.formats import BUDGETED, FINE, FORMATS
from rotationzoo.codec.size import CONTEXT, BudgetSizes, bits_per_element, codec_bits
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.errors import ModelUnavailable
from rotationzoo.figures import size_words
from rotationzoo.geometry import Geometry, cached_layers, cached_rows, geometry_json
from rotationzoo.sides import HEADS
from rotationzoo.words import counted


def show_plan(out: Output, job: Job, question_tokens: int = 0) -> None:
    """Plan the job from the model's config, and print the plan. `question_tokens`: of the questions
    that may follow, through all caches. Raises `RotationZooError` for text that cannot be used."""
    known = plan(job)
    if known.refusal is None:
        try:
            text = read_text(known)
            further = [text.note] if text and text.note else []
        except ModelUnavailable as error:  # its tokenizer, or the processor of its media
            further = [f"it cannot be calibrated yet: {error}"]
        known = replace(known, notes=(*known.notes, *further))
    data = _plan_json(known) | {"question_tokens": question_tokens}
    out.notes(known.notes)
    out.result(data, str(known.job.output), lambda: _say_plan(known, data))
    if known.refusal is None:
        fits = known.peak_memory_bytes <= known.memory_bytes or job.device_map is not None
        # With a device map, weights that do not fit stay on disk.
        out.suggest(*typed_words("--dry-run"), *([] if fits else ["--device-map", "auto"]))


def _plan_json(known: Plan) -> dict[str, Any]:
    recipe, cached = known.job.recipe, cached_layers(known.geometry or [])
    bits: dict[str, float | None] = dict.fromkeys(FORMATS)
    if cached:
        layouts = {name: CacheLayout.of_recipe(recipe, each) for name, each in FORMATS.items()}
        bits |= {name: bits_per_element(cached, layout) for name, layout in layouts.items()}
        if recipe.budget:
            exact = CacheLayout.of_recipe(recipe, FINE)
            bits = {BUDGETED: codec_bits(cached, BudgetSizes(recipe.budget), exact), **bits}
    return {
        "model": known.source.name,
        "revision": known.source.revision,
        "recipe": recipe.name,
        "feedback": recipe.feedback,
        "layers": len(cached),
        "kv_heads": _common(cached, "kv_heads"),
        "head_dim": _common(cached, "key_dim"),
        "value_head_dim": _common(cached, "value_dim"),
        "tokens": recipe.data.tokens if recipe.needs_statistics else 0,
        "length": recipe.data.length,
        "batch": known.job.batch,
        "weights_bytes": known.weights_bytes,
        "peak_memory_bytes": known.peak_memory_bytes,
        "memory_bytes": known.memory_bytes,
        "artifact_bytes": known.artifact_bytes,
        "bits_per_element": bits,
        "refusal": known.refusal and str(known.refusal),
        "notes": list(known.notes),
        "output": str(known.job.output),
        "geometry": geometry_json(known.geometry or []),
    }


def _common(layers: Geometry, field: str) -> int | list[int]:
    """The value of a field that all layers share, or else the list of all values."""
    values: list[int] = [getattr(layer, field) for layer in layers]
    return values[0] if len(set(values)) == 1 else values


def _say_plan(known: Plan, data: dict[str, Any]) -> None:
    name, job = known.source.name, known.job
    if known.refusal:
        say(f"{name} cannot be calibrated: {known.refusal}")
        return
    if known.geometry is None:
        say(f"{name}: what its layers cache shows only with its weights")
    else:
        heads = f"KV heads {data['kv_heads']}, head dimension {data['head_dim']}"
        if (cached := cached_rows(known.geometry)) is not HEADS:
            heads = f"{cached.words} of {data['head_dim']} elements"
        say(f"{name}: {counted(data['layers'], 'layer')} with a cache, {heads}")
    weights, artifact = size_words(known.weights_bytes), size_words(known.artifact_bytes)
    say(f"Weights {weights}, artifact {artifact}, {counted(data['tokens'], 'token')}")
    peak, present = size_words(known.peak_memory_bytes), size_words(known.memory_bytes)
    shortage = ", which is not enough" if known.peak_memory_bytes > known.memory_bytes else ""
    say(f"Memory: about {peak} of the {present} here{shortage}")
    if data["layers"]:
        bits = [f"{value:.2f} ({format})" for format, value in data["bits_per_element"].items()]
        say(f"Bits per cached element at {CONTEXT:,} tokens, windows included: {', '.join(bits)}")
    if data["question_tokens"]:
        more = counted(data["question_tokens"], "token")
        say(f"Then it asks questions in rounds: at most {more} through the model")
    say(f"Would write: {job.output}")
