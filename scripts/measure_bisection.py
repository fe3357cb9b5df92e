"""What SGLang's bisection for the clip threshold changes, against the sorted entry that `sglang`
defines.

    python scripts/measure_bisection.py MODEL [--tokens 8192] [--length 1024]

The server sorts when it prefills. When it stores tokens that leave the exact window
(`gpu_flush_int2.py`), and in its fused kernel, it bisects between 0 and the row's maximum instead,
log2(D) times, and takes the upper end (for D of 64 and more). Prints, for rotated keys and values
of MODEL: the threshold in units of the sorted one, the share of codes that differ and the mean
squared error of both; then the perplexity with either rule for all rows.
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
        artifact = calibrate(
            Job(
                args.model,
                PRESETS["oscar"].model_copy(update={"data": data}),
                Path(work) / "artifact",
            )
        )
        report = {"model": args.model, **codes(args.model, artifact.rotations, data)}
        for format in ("sglang", "sglang-bisected"):
            job = Evaluation(args.model, [artifact.folder], data, queries=0, format=format)
            arms = evaluate(job)["arms"]
            report[f"perplexity increase, {format}"] = {
                arm: arms[arm]["perplexity_increase"] for arm in arms
            }
    print(json.dumps(report, indent=2))


@torch.no_grad()
def codes(model: str, rotations: Rotations, data: Data) -> dict[str, dict[str, float]]:
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
    found = {}
    for side, ratio in (("key", PRESETS["oscar"].key_clip), ("value", PRESETS["oscar"].value_clip)):
        stored = torch.cat(rows[side])
        ours = int2.quantize(stored, ratio)
        theirs = int2.quantize(stored, ratio, format=BISECTED)
        relative = int2.bisected_threshold(stored, ratio) / int2.clip_threshold(stored, ratio)
        errors = [(int2.dequantize(q) - stored).square().mean().item() for q in (ours, theirs)]
        found[f"{side}s at {ratio:g}"] = {
            "rows": len(stored),
            "thresholds that differ": (relative != 1).double().mean().item(),
            "threshold, mean of the sorted one": relative.mean().item(),
            "codes that differ": (ours.codes != theirs.codes).double().mean().item(),
            "mean squared error, of the sorted one": errors[1] / errors[0],
        }
    return found


if __name__ == "__main__":
    main()
