"""What SGLang's bisection for the clip threshold changes, beside the sorted entry that the format
`sglang` defines.

    python scripts/measure_bisection.py MODEL [--tokens 8192] [--length 1024]

The server sorts when it prefills. When it stores tokens that leave the exact window
(`gpu_flush_int2.py`), and in its fused kernel, it bisects between 0 and the row's maximum instead,
log2(D) times, and takes the upper end (for D of 64 and more). Prints JSON: for rotated keys and
values of MODEL the threshold relative to the sorted one, the share of codes that differ and the
ratio of the mean squared errors; then the increase of perplexity with either rule for all rows.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from loading import DEVICE, load

from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.codec import int2
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.evaluation.tasks.settings import TaskSettings
from rotationzoo.model.capture import capture, decoder
from rotationzoo.recipe import PRESETS, Data
from rotationzoo.rotations import Rotations

BISECTED = int2.SIMULATED["sglang-bisected"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    data = Data(tokens=args.tokens, length=args.length)
    with tempfile.TemporaryDirectory() as work:
        recipe = PRESETS["oscar"].model_copy(update={"data": data})
        artifact = calibrate(Job(args.model, recipe, Path(work) / "artifact"))
        report = {"model": args.model, **compare_codes(args.model, artifact.rotations, data)}
        for format in ("sglang", "sglang-bisected"):
            folders, tasks = [artifact.folder], TaskSettings(())
            job = Evaluation(args.model, folders, data, queries=0, format=format, tasks=tasks)
            arms = evaluate(job)["arms"]
            report[f"perplexity increase, {format}"] = {
                arm: arms[arm]["perplexity_increase"] for arm in arms
            }
    print(json.dumps(report, indent=2))


@torch.no_grad()
def compare_codes(model: str, rotations: Rotations, data: Data) -> dict[str, dict[str, float]]:
    """Both rules on the keys and on the values of a model, rotated and clipped as by `oscar`."""
    loaded = load(model, torch.float32, data)
    rows: dict[str, list[torch.Tensor]] = {"key": [], "value": []}

    def observe(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        for side, tensor in (("key", key), ("value", value)):
            matrix = rotations[layer][side].matrix.to(tensor.device)
            rows[side].append((tensor.float() @ matrix).flatten(0, 2).cpu())

    with capture(loaded.model, observe):
        for ids in loaded.batches(1):
            decoder(loaded.model)(input_ids=ids.to(DEVICE), use_cache=False)
    clips = {"key": PRESETS["oscar"].key_clip, "value": PRESETS["oscar"].value_clip}
    compared = {}
    for side, ratio in clips.items():
        rotated = torch.cat(rows[side])
        by_sorting = int2.quantize(rotated, ratio)
        by_bisection = int2.quantize(rotated, ratio, format=BISECTED)
        relative = int2.bisected_threshold(rotated, ratio) / int2.clip_threshold(rotated, ratio)
        error = mean_squared_error(by_bisection, rotated) / mean_squared_error(by_sorting, rotated)
        compared[f"{side}s at {ratio:g}"] = {
            "rows": len(rotated),
            "thresholds that differ": (relative != 1).double().mean().item(),
            "threshold, mean of the sorted one": relative.mean().item(),
            "codes that differ": (by_sorting.codes != by_bisection.codes).double().mean().item(),
            "mean squared error, of the sorted one": error,
        }
    return compared


def mean_squared_error(quantized: int2.Quantized, rows: torch.Tensor) -> float:
    return (int2.dequantize(quantized) - rows).square().mean().item()


if __name__ == "__main__":
    main()
