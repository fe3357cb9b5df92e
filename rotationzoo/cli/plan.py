"""`rotationzoo plan`: what context and how many requests of a model fit a GPU."""

from typing import TYPE_CHECKING, Any, Literal

from rotationzoo.cli.next_steps import named, retyped, shell_line
from rotationzoo.cli.output import Output, say, table
from rotationzoo.codec.formats import BUDGETED, SIMULATED
from rotationzoo.model.files import is_gguf
from rotationzoo.settings import RECIPES, CalibrationSettings, ModelName, Revision, RopeScaling
from rotationzoo.settings_base import option
from rotationzoo.sides import HEADS
from rotationzoo.words import counted, size_words

if TYPE_CHECKING:
    from rotationzoo.calibration.plan import Job
    from rotationzoo.capacity.plan import Capacity


def plan_command(
    model: ModelName,
    out: Output,
    gpu: str | None = option("A card, its memory, or several: H100, 2x24GiB (24GiB)."),
    context: int | None = option("Tokens of each request (131072, or all positions).", min=1),
    requests: int = option("Requests at the same time.", min=1, default=1),
    format: Literal["segments", "vllm", "sglang"] = option(
        "How our cache stores rows: by a budget (segments), or as an engine.", default=BUDGETED
    ),
    bits: float | None = option("Bits of that budget (the recipe's 2.5).", min=1, max=4),
    revision: Revision = None,
    rope_scaling: RopeScaling = None,
) -> None:
    """Show what context and how many requests of a model fit a GPU.

    It reads only the config, and counts all memory that a server takes. It answers for caches in
    bf16, in fp8 and in 2 bits, and for weights as published and in 4 bits.

    rotationzoo plan meta-llama/Llama-3.3-70B-Instruct --gpu "2x RTX 3090" --bits 2.25

    rotationzoo plan Qwen/Qwen3-4B --gpu H200 --context 100000 --requests 256
    """
    from rotationzoo.api import calibration_job
    from rotationzoo.budget import Budget
    from rotationzoo.capacity import plan, shape
    from rotationzoo.codec.options import check_budget

    check_budget(Budget(bits), True, format)
    card, is_quick = plan.parse_card(gpu or "24GiB"), format != BUDGETED
    asked = CalibrationSettings(model, bits=bits, quick=is_quick, rope_scaling=rope_scaling)
    job = calibration_job(asked)
    recipe, scaling = job.recipe, job.recipe.rope_scaling
    storage = shape.Storage(SIMULATED[format], recipe.sink, recipe.recent, bits=recipe.bits)
    wish = plan.Wish(model, context, requests, card, storage, revision, scaling)
    capacity = plan.measure_capacity(wish)
    answer = plan.judge_wish(capacity)
    commands = _commands(capacity, format, job)
    assumed = [] if gpu else [f"no --gpu was given: {card.name} is assumed"]
    data = {
        **plan.capacity_json(capacity),
        "format": format,
        "fits": answer.cache is not None,
        "answer": answer.words,
        "needs": {"weights": answer.weights, "cache": answer.cache},
        "remarks": [*assumed, *plan.remarks(capacity)],
        "commands": [shell_line(*words) for words in commands],
    }

    def human() -> None:
        say(answer.words)
        _show_contexts(capacity, data, answer.weights or "4bit")
        say(*(f"Note: {note}" for note in data["remarks"]))

    out.result(data, answer.words, human)
    if answer.context:
        out.suggest(*retyped({"--context": str(answer.context)}))
    elif answer.cache is not None:
        out.suggest(*commands[0])


def _show_contexts(capacity: "Capacity", data: dict[str, Any], weights: str) -> None:
    """How long requests can be for several numbers of them, and what else a server takes."""
    from rotationzoo.capacity.plan import OWN, WEIGHTS_WORDS

    card, wished, caches = capacity.wish.card, data["requests"], data["kv_bytes_per_request"]
    rows = []
    for requests in sorted({1, 64, wished if wished not in (1, 64) else 8}):
        most = [capacity.longest(weights, cache, card, requests) for cache in caches]
        rows.append([counted(requests, "request")])
        for count in most:
            rows[-1].append("any" if count is None else f"{count:,}")
    size = size_words(data["weights_bytes"][weights])
    title = f"Tokens of each on {card.name}, next to {WEIGHTS_WORDS[weights]} ({size})"
    table(title, ["", *map(capacity.cache_words, caches)], rows)
    taken = {"exact copies and prompts": data["server_bytes"], "vLLM itself": card.count * OWN}
    parts = [f"{size_words(size)} for {what}" for what, size in taken.items() if size]
    say(f"Also counted: {', '.join(parts)}")


def _commands(capacity: "Capacity", format: str, job: "Job") -> list[list[str]]:
    """The words of the commands that lead to our own cache."""
    from rotationzoo.recipe.loading import PRESETS

    wish, artifact = capacity.wish, str(job.output)
    model = named(wish.model, wish.revision, wish.rope_scaling)
    calibrate, generate = ["calibrate", *model], ["generate", *model, "--rotations", artifact]
    server = ["export", artifact, "--for", format]
    if format != BUDGETED:
        calibrate.append("--quick")
        generate += ["--format", format]
    elif job.recipe.budget != PRESETS[RECIPES[0]].budget:  # the default's
        calibrate += ["--bits", f"{wish.storage.bits:g}"]
    if format in (BUDGETED, "vllm"):
        limits = ["--max-model-len", str(capacity.context), "--max-num-seqs", str(wish.requests)]
        if wish.card.count > 1:
            limits += ["--tensor-parallel-size", str(wish.card.count)]
        # It scales RoPE as the rotations do.
        server = ["serve", *named(wish.model, wish.revision), "--rotations", artifact, *limits]
    can_serve = capacity.shape.layers[0].cached is HEADS and not is_gguf(capacity.source.folder)
    return [calibrate, generate, *([server] if can_serve else [])]
