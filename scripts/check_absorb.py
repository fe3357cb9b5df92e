"""Hold a model that absorbed its value rotation, or its equalizers where the artifact has some,
against the model that it was made from.

    python scripts/check_absorb.py MODEL ARTIFACT [--data FILE] [--tokens 4096] [--length 2048]

Absorbs into a float32 and a bfloat16 copy of the weights and prints JSON. `float32`: how far the
logits move. `bfloat16`: how far they are from those of the float32 model, relative in RMS, with
weights rounded and arithmetic in float32, and with both in bfloat16; absorbed weights beside plain
ones, which a checkpoint in bfloat16 does not round at all. `perplexity`: with the 2-bit cache of
the artifact, and of the absorbed model with the same key rotation and no value rotation, whose
codec sees the same rows (or, of the folded model, with rotations alone); and, to show that it would
be seen, with everything applied twice.
"""

import argparse
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from loading import DEVICE, Loaded, load

from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.weights import folded_rotations
from rotationzoo.engines.absorb import absorb, fold
from rotationzoo.evaluation.forward import token_losses
from rotationzoo.model import loading
from rotationzoo.model.source import config_hash, fetch, find, weights_fingerprint
from rotationzoo.recipe import Data
from rotationzoo.rotations import Rotation
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.text.documents import HELD_OUT

RELATIVE, ABSOLUTE, PERPLEXITY = 2e-6, 1e-4, 1e-3  # allowed: of logits, and of perplexity
ROUNDED = {torch.float32: "weights", torch.bfloat16: "weights_and_arithmetic"}


def variant(model: str, artifact: Artifact, dtype: torch.dtype, folder: Path) -> tuple[Path, Path]:
    """The model in one type, and the same with the rotation absorbed."""
    source = find(model)
    fetch(source)
    plain = folder / "plain"
    loading.load(source, loading.load_config(source), "cpu", dtype).save_pretrained(plain)
    loading.load_tokenizer(source).save_pretrained(plain)
    copy = find(str(plain))
    made_for = {
        "config_sha256": config_hash(copy),
        "weights_fingerprint": weights_fingerprint(copy),
        "revision": None,
    }
    manifest = artifact.content | {"model": artifact.content["model"] | made_for}
    write = fold if artifact.recipe.equalize else absorb
    return plain, write(replace(artifact, content=manifest), str(plain), folder / "absorbed")


@torch.no_grad()
def logits(loaded: Loaded) -> torch.Tensor:
    """Of every row, `[B, T, vocabulary]` float32 on the CPU."""
    rows = [
        loaded.model(input_ids=ids, use_cache=False).logits.float().cpu()
        for ids in loaded.batches(1)
    ]
    return torch.cat(rows)


def rms(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return (difference.norm() / reference.norm()).item()


@torch.no_grad()
def perplexity(loaded: Loaded, cache: CacheLayout, arm: Arm | None) -> float:
    """Past the tokens that every query reads exactly; without an arm, of the exact model."""
    batches = loaded.batches(1)
    layers = {layer.index for layer in loaded.geometry}
    losses = []
    for ids in batches:
        if arm is None:
            losses.append(token_losses(loaded.model, ids, cache.first_quantized))
            continue
        with Simulation(arm, cache, loaded.geometry, layers).running(loaded.model):
            losses.append(token_losses(loaded.model, ids, cache.first_quantized))
    return math.exp(torch.cat(losses).double().mean().item())


def remaining(artifact: Artifact, arm: Arm) -> Arm:
    """What is left to the cache of a model that absorbed its part of the artifact."""
    if artifact.recipe.equalize:
        return replace(arm, name="absorbed", rotations=folded_rotations(artifact))

    def unrotated(layer: int, side: str, rotation: Rotation) -> Rotation:
        if side == "key":
            return rotation
        identity = torch.eye(rotation.dim).expand_as(rotation.matrix)
        return replace(rotation, matrix=identity.contiguous())

    return replace(arm, name="absorbed", rotations=arm.rotations.replace(unrotated))


def check(model: str, artifact: Artifact, data: Data) -> dict[str, dict[str, float]]:
    recipe = artifact.recipe
    cache = CacheLayout(sink=recipe.sink, recent=recipe.recent)
    arm = Arm("artifact", artifact.rotations, recipe.group_size)
    with tempfile.TemporaryDirectory() as work:
        plain, absorbed = variant(model, artifact, torch.float32, Path(work) / "float32")
        loaded = load(str(plain), torch.float32, data)
        exact = logits(loaded)
        perplexities = {
            "exact": perplexity(loaded, cache, None),
            "artifact": perplexity(loaded, cache, arm),
        }
        loaded = load(str(absorbed), torch.float32, data)
        difference = (logits(loaded) - exact).abs().max().item()
        perplexities |= {
            "absorbed_exact": perplexity(loaded, cache, None),
            "absorbed": perplexity(loaded, cache, remaining(artifact, arm)),
            "applied_twice": perplexity(loaded, cache, arm),
        }
        plain, absorbed = variant(model, artifact, torch.bfloat16, Path(work) / "bfloat16")
        rounded = {}
        for name, model_folder in (("plain", plain), ("absorbed", absorbed)):
            for dtype, what in ROUNDED.items():
                moved = logits(load(str(model_folder), dtype, data)) - exact
                rounded[f"{name}_{what}"] = rms(moved, exact)
    return {
        "float32": {"relative": difference / exact.abs().max().item(), "absolute": difference},
        "bfloat16": rounded,
        "perplexity": perplexities
        | {"relative_difference": perplexities["absorbed"] / perplexities["artifact"] - 1},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--data", default=str(HELD_OUT))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    data = Data(source=args.data, tokens=args.tokens, length=args.length)
    measured = check(args.model, Artifact.open(args.artifact), data)
    about = {"model": args.model, "artifact": str(args.artifact), "device": DEVICE}
    print(json.dumps({**about, **measured}, indent=2))
    moved, lost = measured["float32"], abs(measured["perplexity"]["relative_difference"])
    if not (moved["relative"] <= RELATIVE and moved["absolute"] <= ABSOLUTE and lost <= PERPLEXITY):
        sys.exit(
            f"more than {RELATIVE:.0e} of the logits, {ABSOLUTE:.0e}, or {PERPLEXITY:.1%} of the "
            "perplexity"
        )


if __name__ == "__main__":
    main()
