"""What each ingredient of the recipe `best` is worth: calibrate arms on one text, evaluate them on
another, and compare them text by text.

    python scripts/benchmark_quality.py MODEL... --calibration FILE --data FILE --output FOLDER
                                        [--arms "A;B"] [--settings S,T]

Settings: `2048` and `4096` tokens a text, and `chunks` (2048 tokens, prefilled in chunks of 512 as
OSCAR's server writes them). Prints a table for each model and setting, with the increase of
perplexity and the attention KL of every arm, and their ratios to `oscar-v1`; then the same over all
models. FOLDER gets the artifacts, and the numbers as `MODEL.json`. What FOLDER already holds is not
computed again, so that each model can have a process of its own, and a last call shows them all.
"""

import argparse
import json
import math
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.evaluation.tasks.settings import TaskSettings
from rotationzoo.linalg.paired import paired_difference
from rotationzoo.recipe import PRESETS, SELF, Data, Recipe, Search

BEST, UNCENTERED = PRESETS["best"], PRESETS["best-uncentered"]
OSCAR = PRESETS["oscar"].model_copy(update={"data": BEST.data})
KEY_AND_VALUE = {"key_statistic": "key", "value_statistic": "value"}
CLIP = {"key_clip": 0.9, "value_clip": 0.92}
ARMS: dict[str, Recipe] = {
    "oscar-v1": PRESETS["oscar-v1"].model_copy(update={"data": BEST.data}),
    "oscar": OSCAR,
    "oscar, centred": OSCAR.model_copy(update={"center_keys": True}),
    "key and value, centred": OSCAR.model_copy(update={"center_keys": True, **KEY_AND_VALUE}),
    "key and value, centred, clip": OSCAR.model_copy(
        update={"center_keys": True, **KEY_AND_VALUE, **CLIP}
    ),
    "best, not learned": BEST.model_copy(update={"search": Search(steps=0)}),
    "best": BEST,
    "best-uncentered, not learned": UNCENTERED.model_copy(update={"search": Search(steps=0)}),
    "best-uncentered": UNCENTERED,
    "best, values centred": BEST.model_copy(update={"center_values": True}),
    "best, one start": BEST.model_copy(update={"search": Search(starts=1)}),
    "best, 4 texts to choose on": BEST.model_copy(update={"search": Search(texts=4)}),
    "best, 65536 tokens": BEST.model_copy(
        update={"data": BEST.data.model_copy(update={"tokens": 65536})}
    ),
    "best, rows of 2048": BEST.model_copy(
        update={"data": Data(tokens=BEST.data.tokens, length=2048)}
    ),
    "best, self": BEST.model_copy(update={"data": BEST.data.model_copy(update={"source": SELF})}),
}
SETTINGS: dict[str, tuple[int, int, int | None]] = {
    "2048": (64, 2048, None), "4096": (32, 4096, None), "chunks": (64, 2048, 512),
}  # fmt: skip
BASES = ("oscar-v1", "oscar", "hadamard")
CLEAR = 1e-3  # of log perplexity, beside two standard errors

Arms = dict[str, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, help="of calibration, for every arm")
    parser.add_argument("--length", type=int, help="of a row of calibration, for every arm")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--arms", default=";".join(ARMS))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    options = parser.parse_args()
    arms = [name for name in ARMS if name in options.arms.split(";")]
    results: dict[str, dict[str, Arms]] = {}
    for model in options.models:
        path = options.output / f"{Path(model).name}.json"
        results[model] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for setting in options.settings.split(","):
            measured = results[model].setdefault(setting, {})
            if missing := [name for name in arms if name not in measured]:
                # Baselines measured before win: theirs are the clip ratios of the first arm.
                measured |= measure(model, missing, setting, options) | measured
                path.write_text(json.dumps(results[model], indent=2) + "\n", encoding="utf-8")
            show(f"{model}, {setting}", measured)
    if len(results) > 1:
        for setting in options.settings.split(","):
            show_together(setting, [settings[setting] for settings in results.values()])
    return 0


def measure(model: str, arms: list[str], setting: str, options: argparse.Namespace) -> Arms:
    """Calibrate what has no artifact yet, and evaluate: each arm's measures and the losses of its
    texts, and the losses of the exact model."""
    folders = [calibrate_arm(model, name, options) for name in arms]
    texts, length, chunk = SETTINGS[setting]
    data = Data(source=options.data, tokens=texts * length, length=length)
    report = evaluate(
        Evaluation(
            model,
            folders,
            data,
            dtype="float32",
            batch=4,
            prefill_chunk=chunk,
            tasks=TaskSettings(()),
        )
    )
    measures = ("perplexity_increase", "attention_kl", "output_error", "text_losses")
    names = [*arms, "none", "hadamard", "random"]
    kept = {
        name: {key: arm[key] for key in measures}
        for name, arm in zip(names, report["arms"].values(), strict=True)
    }
    return kept | {"exact": {"text_losses": report["exact"]["text_losses"]}}


def calibrate_arm(model: str, name: str, options: argparse.Namespace) -> Path:
    """The folder of an arm's artifact, calibrated now unless it exists."""
    recipe = ARMS[name]
    changes = {key: getattr(options, key) for key in ("tokens", "length")}
    changes = {key: value for key, value in changes.items() if value is not None}
    source = "prompts" if recipe.data.source == SELF else "source"
    data = recipe.data.model_copy(update={source: options.calibration, **changes})
    recipe = recipe.model_copy(update={"data": data})
    folder = options.output / Path(model).name / re.sub(r"[^\w-]+", "-", name)
    started, exists = time.monotonic(), folder.exists()
    artifact = calibrate(Job(model, recipe, folder, dtype="float32", batch=options.batch))
    if not exists:
        print(f"{model}, {name}: {time.monotonic() - started:.0f} s", flush=True)
    return artifact.folder


def show(title: str, arms: Arms) -> None:
    """Print one row per arm, beside `oscar-v1`, and the correlation over arms of what single layers
    show with what the model loses."""
    print(f"\n{title}")
    base = arms.get("oscar-v1")
    compared = {name: arm for name, arm in arms.items() if name != "exact"}
    for name, arm in compared.items():
        increase, kl = arm["perplexity_increase"], arm["attention_kl"]
        _, error = difference(arm, arms["exact"])
        line = f"{name:30s} {increase:+9.2%} ±{error:.2%}  KL {kl:.4f}"
        if base is not None:
            increase_ratio, kl_ratio = (
                increase / base["perplexity_increase"],
                kl / base["attention_kl"],
            )
            words = verdict(*difference(arm, base))
            line += f"  of oscar-v1: {increase_ratio:.3f}, {kl_ratio:.3f}  {words}"
        print(line)
    of_kl, of_error = (correlation(compared, key) for key in ("attention_kl", "output_error"))
    print(
        "correlation over arms with the increase of perplexity, of logarithms: "
        f"attention KL {of_kl:.2f}, block error {of_error:.2f}",
        flush=True,
    )


def show_together(setting: str, models: list[Arms]) -> None:
    """Print ratios of the means over models. Errors are over the choice of texts, which are the
    same for all models."""
    title = f"\n{len(models)} models, {setting}"
    print(f"{title}: of oscar-v1's; and log perplexity beside {', '.join(BASES)}")
    in_all = [name for name in models[0] if all(name in arms for arms in models)]
    for name in in_all:
        if name == "exact":
            continue
        increase, error = ratio(models, name, "oscar-v1")
        base_kl = sum(arms["oscar-v1"]["attention_kl"] for arms in models)
        kl = sum(arms[name]["attention_kl"] for arms in models) / base_kl
        beside = []
        for base in BASES:
            by_text = torch.stack(
                [losses(arms[name]) - losses(arms[base]) for arms in models]
            ).mean(0)
            beside.append(f"{by_text.mean():+.2%} ±{by_text.std() / len(by_text) ** 0.5:.2%}")
        print(
            f"{name:30s} {increase:.3f} ±{error:.3f}, KL {kl:.3f}; {', '.join(beside)}", flush=True
        )


def ratio(models: list[Arms], name: str, base: str, draws: int = 2000) -> tuple[float, float]:
    """The ratio of the mean perplexity increases of two arms, and its standard error by bootstrap
    over texts."""
    arm_losses = torch.stack([losses(arms[name]) - losses(arms["exact"]) for arms in models])
    base_losses = torch.stack([losses(arms[base]) - losses(arms["exact"]) for arms in models])

    def ratio_over(texts: torch.Tensor) -> torch.Tensor:
        increase = arm_losses[:, texts].mean(-1).expm1().sum(0)
        return increase / base_losses[:, texts].mean(-1).expm1().sum(0)

    count = arm_losses.shape[1]
    drawn = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(0))
    return ratio_over(torch.arange(count)).item(), ratio_over(drawn).std().item()


def losses(arm: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(arm["text_losses"], dtype=torch.float64)


def difference(arm: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """Of log perplexity, paired over texts of one length, with its standard error."""
    mean, error = paired_difference(
        arm["text_losses"], base["text_losses"], [1] * len(arm["text_losses"])
    )
    return mean, math.nan if error is None else error


def correlation(arms: Arms, measure: str) -> float:
    """Pearson's, over arms, of the logarithms of a measure of single layers and of the increase of
    perplexity."""
    pairs = [(arm[measure], arm["perplexity_increase"]) for arm in arms.values()]
    positive = [pair for pair in pairs if min(pair) > 0]
    single_layers = [math.log(value) for value, _ in positive]
    whole_model = [math.log(increase) for _, increase in positive]
    return statistics.correlation(single_layers, whole_model)


def verdict(difference: float, error: float) -> str:
    """Better or worse by more than two standard errors and 0.1 %."""
    clear = abs(difference) > max(2 * error, CLEAR)
    if not clear:
        return "no difference"
    return "better" if difference < 0 else "worse"


if __name__ == "__main__":
    sys.exit(main())
