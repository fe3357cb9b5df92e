"""What each ingredient of the recipe `best` is worth: calibrate arms on one text, evaluate them on another, paired over texts.

    python scripts/benchmark_quality.py MODEL... --calibration FILE --data FILE --output FOLDER [--arms "A;B"] [--settings S,T]

Settings: `2048` and `4096` tokens a text, and `chunk` (2048 tokens, prefilled in chunks of 512). Prints a table for each, with
the increase of perplexity and the attention KL of every arm, and their ratios to `oscar-v1`; FOLDER gets the artifacts
(which are not made again), and the numbers as `quality.json`.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rotationzoo.calibrate import calibrate
from rotationzoo.evaluate import Evaluation, evaluate
from rotationzoo.plan import Job
from rotationzoo.recipe import PRESETS, SELF, Data, Recipe, Search
from rotationzoo.tally import paired_difference

BEST, UNCENTERED, OSCAR = PRESETS["best"], PRESETS["best-uncentered"], PRESETS["oscar"]
OURS = {"key_statistic": "key", "value_statistic": "value"}
SELF_WRITTEN = "best, self"  # on text that the model writes itself
CLIP = {"key_clip": 0.9, "value_clip": 0.92}
ARMS: dict[str, Recipe] = {
    "oscar-v1": PRESETS["oscar-v1"],
    "oscar": OSCAR,
    "oscar, centred": OSCAR.model_copy(update={"center_keys": True}),
    "key and value, centred": OSCAR.model_copy(update={"center_keys": True, **OURS}),
    "key and value, centred, clip": OSCAR.model_copy(update={"center_keys": True, **OURS, **CLIP}),
    "best, not learned": BEST.model_copy(update={"search": Search(steps=0)}),
    "best": BEST,
    "best-uncentered, not learned": UNCENTERED.model_copy(update={"search": Search(steps=0)}),
    "best-uncentered": UNCENTERED,
    SELF_WRITTEN: BEST,
}
SETTINGS: dict[str, tuple[int, int, int | None]] = {
    "2048": (64, 2048, None), "4096": (32, 4096, None), "chunk": (64, 2048, 512),
}  # fmt: skip
CLEAR = 1e-3  # of log perplexity, beside two standard errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--arms", default=";".join(ARMS))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    options = parser.parse_args()
    arms = [name for name in ARMS if name in options.arms.split(";")]
    found: dict[str, Any] = {}
    for model in options.models:
        folders, found[model] = [], {"seconds": {}}
        for name in arms:
            own = name == SELF_WRITTEN
            text = {"source": SELF, "prompts": options.calibration} if own else {"source": options.calibration}
            data = BEST.data.model_copy(update=text | {"tokens": options.tokens})  # the same for all arms
            recipe = ARMS[name].model_copy(update={"data": data})
            folder = options.output / Path(model).name / name.replace(", ", "-").replace(" ", "-")
            there = folder.exists()
            started = time.monotonic()
            folders.append(calibrate(Job(model, recipe, folder, dtype="float32", batch=16)).folder)
            if not there:
                found[model]["seconds"][name] = round(time.monotonic() - started, 1)
        for setting in options.settings.split(","):
            texts, length, chunk = SETTINGS[setting]
            data = Data(source=options.data, tokens=texts * length, length=length)
            report = evaluate(Evaluation(model, folders, data, dtype="float32", batch=4, prefill_chunk=chunk))
            named = dict(zip([*arms, "none", "hadamard", "random"], report["arms"].values(), strict=True))
            found[model][setting] = {name: summary(arm, named.get("oscar-v1"), report) for name, arm in named.items()}
            show(model, setting, found[model][setting])
            (options.output / "quality.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


def summary(arm: dict[str, Any], base: dict[str, Any] | None, report: dict[str, Any]) -> dict[str, Any]:
    """An arm beside `oscar-v1`: the paired difference of log perplexity over texts, with its standard error."""
    kept = {key: arm[key] for key in ("perplexity_increase", "attention_kl", "output_error", "text_losses")}
    kept["standard_error"] = arm["standard_error"]["perplexity_increase"]
    if base is not None:
        tokens = [1] * len(arm["text_losses"])  # texts of one length
        kept["difference"], kept["difference_error"] = paired_difference(arm["text_losses"], base["text_losses"], tokens)
    return kept


def show(model: str, setting: str, arms: dict[str, dict[str, Any]]) -> None:
    base = arms.get("oscar-v1")
    print(f"\n{model}, {setting}")
    for name, arm in arms.items():
        error = arm["standard_error"] or math.nan
        line = f"{name:32s} {arm['perplexity_increase']:+8.2%} ±{error:.2%}  KL {arm['attention_kl']:.4f}"
        if base is not None:
            ratios = [arm[key] / base[key] for key in ("perplexity_increase", "attention_kl")]
            line += f"  of oscar-v1: {ratios[0]:.2f}, {ratios[1]:.2f}  {verdict(arm)}"
        print(line)
    by_layer = {"attention KL": "attention_kl", "block error": "output_error"}
    print("correlation over arms with the increase of perplexity, of logarithms:", end=" ")
    print(", ".join(f"{name} {correlation(arms, measure):.2f}" for name, measure in by_layer.items()), flush=True)


def correlation(arms: dict[str, dict[str, Any]], measure: str) -> float:
    """Pearson's, over arms, of the logarithms of a measure of single layers and of the increase of perplexity."""
    pairs = [(arm[measure], arm["perplexity_increase"]) for arm in arms.values()]
    ours, loss = zip(*((math.log(a), math.log(b)) for a, b in pairs if a > 0 and b > 0), strict=True)
    return statistics.correlation(ours, loss)


def verdict(arm: dict[str, Any]) -> str:
    """Better or worse than `oscar-v1` by more than two standard errors and 0.1 %."""
    difference, error = arm["difference"], arm["difference_error"] or 0.0
    clear = abs(difference) > max(2 * error, CLEAR)
    return ("better" if difference < 0 else "worse") if clear else "no difference"


if __name__ == "__main__":
    sys.exit(main())
