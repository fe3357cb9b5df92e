"""What evaluating costs at long texts: seconds of a text and of a recall prompt, through the exact
model and through one arm.

A model with random weights answers nothing, and `evaluate` would ask no arm what the exact model
cannot do. Here an arm is asked all the same: only the time counts. The prompts are the real ones,
in the tokens of the demo model, whose ids are the first of the larger vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from measuring import seconds_of
from scale_models import device_peak, random_text
from scale_statistics import Bench, Text

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.measured import AboutArm
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.evaluation.arms import BASELINES, Arm
from rotationzoo.evaluation.compatibility import judged_text
from rotationzoo.evaluation.forward import Trial, run_models
from rotationzoo.evaluation.tasks.prompts import TaskPlan, TaskSettings, plan_tasks
from rotationzoo.model.loading import load_tokenizer
from rotationzoo.model.source import find
from rotationzoo.progress import silent
from rotationzoo.recall.answers import read_answers
from rotationzoo.recall.prompts import Prompt
from rotationzoo.recipe import Data
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.text.rows import read_corpus

_WARMING = 2048  # tokens of a first, untimed text


def measure_evaluate(bench: Bench, length: int) -> dict[str, Any]:
    """Times and memory at texts of `length` tokens, for one arm with fitted rotations."""
    small = replace(bench, text=Text(tokens=_WARMING, length=_WARMING, batch=1))
    rotations = fit(small.collect(PRESETS["oscar"]), PRESETS["oscar"], bench.geometry)
    codec = RotatedCodec(rotations, PRESETS["oscar"].group_size)
    arm = Arm(AboutArm(name="oscar", kind="baseline"), codec)
    plan = _write_prompts(length)
    prompts = [series.prompts[0] for series in plan.series]
    blind = [series.blind[0] for series in plan.series]
    _run_text(bench, _WARMING, [arm])
    _ask(bench, blind[:1], arm)
    text: dict[str, float] = {}
    prompt: dict[str, float] = {}

    def measure() -> None:
        text["exact"] = seconds_of(lambda: _run_text(bench, length, []))
        prompt["exact"] = seconds_of(lambda: _ask(bench, prompts)) / len(prompts)
        prompt["blind"] = seconds_of(lambda: _ask(bench, blind)) / len(blind)
        # An arm runs beside the exact model, whose time is not its own.
        both = seconds_of(lambda: _run_text(bench, length, [arm]))
        text["arm"] = both - text["exact"]
        prompt["arm"] = seconds_of(lambda: _ask(bench, prompts[:2], arm)) / 2

    peak = device_peak(measure)
    return {
        **bench.describe(),
        "length": length,
        "tokens": length,
        "batch": 1,
        "seconds_per_text": text,
        "seconds_per_prompt": prompt,
        "tasks": [series.task for series in plan.series],
        "prompts": sum(len(series.prompts) for series in plan.series),
        "arms": len(BASELINES) + 1,
        "device_peak_bytes": peak,
    }


def _run_text(bench: Bench, length: int, arms: Sequence[Arm]) -> None:
    """One text through the exact model and these arms, with the metrics that `evaluate` takes."""
    cache = CacheLayout()
    layers = [layer.index for layer in bench.geometry]
    trial = Trial(
        bench.geometry, arms, [cache], layers, ("key", "value"), 32, cache.first_quantized
    )
    run_models(bench.model, [random_text(bench.shape, 1, length).cpu()], trial, silent)


def _write_prompts(length: int) -> TaskPlan:
    """The prompts of all tasks, as many as `evaluate` asks by default."""
    tokenizer = load_tokenizer(find("demo"))
    data = judged_text(Data(tokens=2 * length, length=length))
    settings = TaskSettings(lengths=(length,))
    text = read_corpus(data, tokenizer)
    return plan_tasks(settings, data, text, tokenizer, [CacheLayout()])


@torch.no_grad()
def _ask(bench: Bench, prompts: list[Prompt], arm: Arm | None = None) -> None:
    """Ask the exact model, or one arm, one prompt at a time."""
    layers = {layer.index for layer in bench.geometry}
    for prompt in prompts:
        running: AbstractContextManager[None] = nullcontext()
        if arm is not None:
            running = Simulation(arm.codec, CacheLayout(), bench.geometry, layers).running(
                bench.model
            )
        with running:
            read_answers(bench.model, [prompt])


def evaluate_lines(result: dict[str, Any]) -> list[str]:
    """What a reader wants to know of it."""
    lines = []
    for what in ("text", "prompt"):
        seconds = result[f"seconds_per_{what}"]
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        lines.append(f"a {what} of {result['length']:,} tokens: {parts}")
    lines.append(
        f"one text and {result['prompts']} prompts through {result['arms']} arms like this: "
        f"{whole_evaluation(result):.0f} s"
    )
    lines.append(f"peak {result['device_peak_bytes'] / 1e9:.1f} GB on the device")
    return lines


def whole_evaluation(result: dict[str, Any]) -> float:
    """Seconds of `evaluate` with one text, all prompts and all arms, computed from the parts."""
    text, prompt = result["seconds_per_text"], result["seconds_per_prompt"]
    arms, prompts = result["arms"], result["prompts"]
    a_prompt = prompt["exact"] + prompt["blind"] + arms * prompt["arm"]
    seconds: float = text["exact"] + arms * text["arm"] + prompts * a_prompt
    return seconds
