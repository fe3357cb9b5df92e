"""What `calibrate --dry-run` prints: a table for people, one object for machines."""

from typing import Any

from rotationzoo.cache.size import CONTEXT, bits_per_element
from rotationzoo.calibration.plan import Job
from rotationzoo.calibration.plan import plan as make_plan
from rotationzoo.cli.output import Output, say
from rotationzoo.codec.int2 import FORMATS
from rotationzoo.model.geometry import cached_layers, geometry_json
from rotationzoo.recipe import Search


def show_plan(out: Output, asked: Job) -> None:
    """Look at the model, and print what is known of the job."""
    plan = make_plan(asked)
    job = plan.job
    cached = cached_layers(plan.geometry or [])

    def common(values: list[Any]) -> Any:
        """The one value that all layers share, or the list of them."""
        return values[0] if len(set(values)) == 1 else values

    data: dict[str, Any] = {
        "model": plan.source.name,
        "revision": plan.source.revision,
        "recipe": job.recipe.name,
        "layers": len(cached),
        "kv_heads": common([layer.kv_heads for layer in cached]),
        "head_dim": common([layer.key_dim for layer in cached]),
        "value_head_dim": common([layer.value_dim for layer in cached]),
        "tokens": job.recipe.data.tokens if job.recipe.needs_statistics else 0,
        "length": job.recipe.data.length,
        "weights_bytes": plan.weights_bytes,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "memory_bytes": plan.memory_bytes,
        "artifact_bytes": plan.artifact_bytes,
        "search": _search(job),
        "bits_per_element": {
            name: bits_per_element(
                cached, job.recipe.group_size, form, job.recipe.sink, job.recipe.recent
            )
            if cached
            else None
            for name, form in FORMATS.items()
        },
        "refusal": str(plan.refusal) if plan.refusal else None,
        "notes": list(plan.notes),
        "output": str(job.output),
        "geometry": geometry_json(plan.geometry or []),
    }

    out.notes(plan.notes)

    def human() -> None:
        if plan.refusal:
            say(f"{plan.source.name} cannot be calibrated: {plan.refusal}")
            return
        if plan.geometry is None:
            say(f"{plan.source.name}: what its layers cache shows only with its weights")
        else:
            heads = f"KV heads {data['kv_heads']}, head dimension {data['head_dim']}"
            say(f"{plan.source.name}: {data['layers']} layers with a cache, {heads}")
        say(
            f"Weights {_size(plan.weights_bytes)}, artifact {_size(plan.artifact_bytes)}, {data['tokens']:,} tokens"
        )
        enough = ", which is not enough" if plan.peak_memory_bytes > plan.memory_bytes else ""
        say(
            f"Memory: about {_size(plan.peak_memory_bytes)} of the {_size(plan.memory_bytes)} here{enough}"
        )
        if job.recipe.search is not None:
            say(_search_words(job.recipe.search, job.budget))
        if cached:
            bits = ", ".join(
                f"{value:.2f} ({name})" for name, value in data["bits_per_element"].items()
            )
            say(f"Bits per cached element at {CONTEXT:,} tokens, windows included: {bits}")
        say(f"Would write: {job.output}")

    out.result(data, str(job.output), human)


def _search(job: Job) -> dict[str, Any] | None:
    """What the recipe searches, and the minutes for it; None for those that do not search."""
    if job.recipe.search is None:
        return None
    return job.recipe.search.model_dump() | {"budget_minutes": job.budget}


def _search_words(search: Search, budget: float | None) -> str:
    """No time is given but what was asked for: how long a search takes without a budget shows only
    when it runs."""
    tried = (
        f"{search.steps} steps of learning from {search.starts} starts a head"
        if search.steps
        else "closed forms alone"
    )
    limit = "no limit of time (--budget MINUTES sets one)"
    if budget is not None:
        limit = f"{budget:g} minutes for learning and clip ratios, beside what statistics and scoring take"
    return f"Search: {tried}, chosen on up to {search.texts} texts held out, in the format {search.format}; {limit}"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
