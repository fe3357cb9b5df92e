"""What SGLang's bisection for the clip threshold changes, against the sorted entry that `sglang` defines.

    python scripts/measure_bisection.py MODEL [--tokens 8192] [--length 1024]

The server sorts when it prefills. When it stores tokens that leave the exact window (`gpu_flush_int2.py`), and in its fused
kernel, it bisects between 0 and the row's maximum instead, log2(D) times, and takes the upper end (for D of 64 and more).
Prints, for rotated keys and values of MODEL: the threshold in units of the sorted one, the share of codes that differ and the
mean squared error of both; then the perplexity with either rule for all rows.
"""

import argparse
import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from loading import DEVICE, load

from rotationzoo import int2
from rotationzoo.calibrate import calibrate
from rotationzoo.capture import capture, decoder
from rotationzoo.evaluate import Evaluation, evaluate
from rotationzoo.plan import Job
from rotationzoo.recipe import PRESETS, Data

SORTED = int2.clip_threshold


def bisected(rows: torch.Tensor, ratio: float | torch.Tensor, interpolated: bool = False) -> torch.Tensor:
    """The threshold `[...]` of rows `[..., D]`: the upper end after log2(D) halvings of the range in which at most
    `D - floor(c D)` magnitudes are above; where the rank is that of the largest, no clip."""
    dim = rows.shape[-1]
    entry, _ = (t.to(rows.device).expand(rows.shape[:-1]) for t in int2.clip_position(ratio, dim, interpolated))
    magnitudes = rows.abs()
    high = magnitudes.amax(-1)
    low = torch.zeros_like(high)
    for _ in range(dim.bit_length() - 1):
        middle = (low + high) * 0.5
        too_many = (magnitudes > middle.unsqueeze(-1)).sum(-1) > dim - entry
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    data = Data(tokens=args.tokens, length=args.length)
    with tempfile.TemporaryDirectory() as work:
        there = calibrate(Job(args.model, PRESETS["oscar"].model_copy(update={"data": data}), Path(work) / "artifact"))
        report = {"model": args.model, **codes(args.model, there.rotations(), data)}
        job = Evaluation(args.model, [there.folder], data, queries=0)
        for name, rule in (("sorted", SORTED), ("bisected", bisected)):
            with patch.object(int2, "clip_threshold", rule):
                arms = evaluate(job)["arms"]
            report[f"perplexity increase, {name}"] = {arm: arms[arm]["perplexity_increase"] for arm in arms}
    print(json.dumps(report, indent=2))


@torch.no_grad()
def codes(model: str, rotations: dict[str, torch.Tensor], data: Data) -> dict[str, dict[str, float]]:
    loaded = load(model, torch.float32, data)
    rows: dict[str, list[torch.Tensor]] = {"key": [], "value": []}

    def observe(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        for side, tensor in (("key", key), ("value", value)):
            matrix = rotations[f"layers.{layer}.{side}.rotation"].to(tensor.device)
            rows[side].append((tensor.float() @ matrix).flatten(0, 2).cpu())

    with capture(loaded.model, observe):
        for ids in loaded.batches(1):
            decoder(loaded.model)(input_ids=ids.to(DEVICE), use_cache=False)
    found = {}
    for side, ratio in (("key", PRESETS["oscar"].key_clip), ("value", PRESETS["oscar"].value_clip)):
        stored = torch.cat(rows[side])
        ours = int2.quantize(stored, ratio)
        with patch.object(int2, "clip_threshold", bisected):
            theirs = int2.quantize(stored, ratio)
        relative = bisected(stored, ratio) / SORTED(stored, ratio)
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
