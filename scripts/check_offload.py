"""Checks calibration with weights that do not fit the GPU, and of FP8 weights, on one GPU.

    python scripts/check_offload.py [--layers 36] [--folder /tmp]

It writes a model of Qwen3-8B's geometry (huggingface.co/Qwen/Qwen3-8B/blob/main/config.json) with
random bf16 weights, and an FP8 copy in blocks of 128 x 128, and calibrates them: as they are, with
4 GiB of weights on the GPU and the rest in main memory, with the rest on disk, and in FP8. It needs
no network and 26 GB of disk, and prints a line a check. Where the disk is slow, 12 layers are
written instead of 36. `--small` is a model that a CPU can take.
"""

import argparse
import gc
import json
import math
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from rotationzoo import calibrate
from rotationzoo.model import loading
from rotationzoo.model.source import DEMO

GIB = 1 << 30
BLOCK = 128
CAP = 4  # GiB of weights on the GPU
TOLERANCE = 1e-6
SLOW = 0.5e9  # bytes a second of a disk on which 36 layers take too long to write
QWEN3_8B = dict(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
    rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False,
)  # fmt: skip
SMALL = QWEN3_8B | dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=2048,
)  # fmt: skip


def shapes(config: dict, layer: int) -> dict[str, tuple[int, ...]]:
    """The weights of one layer, by the names that transformers gives them."""
    hidden, inner, dim = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    parts = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}


def draw(named: dict[str, tuple[int, ...]], device: str) -> dict[str, torch.Tensor]:
    """Random weights: norms of one, and matrices that keep the size of what they multiply."""
    weights = {}
    for name, shape in named.items():
        weights[name] = torch.ones(shape, dtype=torch.bfloat16, device=device)
        if len(shape) == 2:
            weights[name].normal_(std=shape[1] ** -0.5)
    return weights


def to_fp8(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The projections in blocks of FP8, each with its scale, as released FP8 checkpoints have
    them."""
    stored = {}
    for name, weight in weights.items():
        if "_proj" not in name:
            stored[name] = weight
            continue
        grid = weight.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = grid.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (grid / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = codes.view(weight.shape), scale
    return stored


@dataclass
class Checkpoint:
    """A model's folder, written a shard a layer."""

    folder: Path
    config: dict
    names: dict[str, str] = field(default_factory=dict)

    def write(self, shard: str, weights: dict[str, torch.Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: weight.cpu().contiguous() for name, weight in weights.items()}
        save_file(tensors, self.folder / shard, metadata={"format": "pt"})
        self.names |= dict.fromkeys(tensors, shard)

    def finish(self, **changes) -> None:
        """Write the index, the config, and the demo model's tokenizer."""
        (self.folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": self.names})
        )
        config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16"}
        config |= {"bos_token_id": None, "eos_token_id": 0, **self.config, **changes}
        (self.folder / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, self.folder)

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))


def write_models(folder: Path, config: dict, device: str) -> tuple[Checkpoint, Checkpoint]:
    """The bf16 checkpoint and its FP8 copy."""
    torch.manual_seed(0)
    plain, fp8 = Checkpoint(folder / "bf16", config), Checkpoint(folder / "fp8", config)
    ends = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
        "lm_head.weight": (config["vocab_size"], config["hidden_size"]),
    }
    start = time.monotonic()
    weights = draw(ends, device)
    for checkpoint in (plain, fp8):
        checkpoint.write("ends.safetensors", weights)
        os.sync()
    if plain.bytes + fp8.bytes < SLOW * (time.monotonic() - start):
        layers = config["num_hidden_layers"]
    else:
        layers = min(config["num_hidden_layers"], 12)
    config["num_hidden_layers"] = layers
    for layer in range(layers):
        weights = draw(shapes(config, layer), device)
        plain.write(f"layer-{layer}.safetensors", weights)
        fp8.write(f"layer-{layer}.safetensors", to_fp8(weights))
    plain.finish()
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    fp8.finish(quantization_config=blocks | {"weight_block_size": [BLOCK, BLOCK]})
    return plain, fp8


@dataclass
class Run:
    """One calibration, its times by stage, and where its weights were."""

    artifact: object
    seconds: float
    """From the model's name to the artifact."""
    text_seconds: float
    """The check of the capture, which runs the model twice on a few tokens, and the text."""
    peak: int
    """Bytes allocated on the GPU at most."""
    resident: int
    """Bytes of weights that stay on the GPU."""
    fetched: int
    """Bytes of the largest weight that is elsewhere, and is on the GPU while its module runs."""
    places: set


def run(model: Path, output: Path, **options) -> Run:
    """Calibrate a model in this process."""
    stages, models = {}, []

    def note(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, time.monotonic())

    load = loading.load

    def load_and_keep(*arguments):
        models.append(load(*arguments))
        return models[-1]

    loading.load = load_and_keep
    gc.collect()  # accelerate's hooks and a model refer to each other, so it outlives its run
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.monotonic()
    try:
        artifact = calibrate(str(model), output=output, progress=note, **options)
    finally:
        loading.load = load
    seconds = time.monotonic() - start
    model = models.pop()
    on_gpu = [weight.nbytes for weight in model.parameters() if weight.is_cuda]
    elsewhere = [weight.nbytes for weight in model.parameters() if weight.is_meta]
    places = set(getattr(model, "hf_device_map", {}).values())
    text = stages["composing rotations"] - stages["checking the capture"]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    fetched = max(elsewhere, default=0)
    return Run(artifact, seconds, text, peak, sum(on_gpu), fetched, places)


def largest_difference(run: Run, expected: Run) -> float:
    """The largest relative difference of a statistic, in the Frobenius norm."""
    exact = expected.artifact.statistics_tensors()
    differences = []
    for name, tensor in run.artifact.statistics_tensors().items():
        other = exact[name].double()
        difference = (tensor.double() - other).norm() / other.norm().clamp(min=1e-30)
        differences.append(difference.item())
    return max(differences)


def copy_seconds(size: int, pinned: bool) -> float:
    """Seconds that copies of so many bytes from main memory to the GPU take."""
    if not torch.cuda.is_available():
        return math.nan
    piece = torch.ones(min(size, GIB // 4), dtype=torch.uint8)
    source = piece.pin_memory() if pinned else piece
    target = torch.empty_like(piece, device="cuda")
    target.copy_(source)
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(-(-size // piece.nbytes)):
        target.copy_(source)
    torch.cuda.synchronize()
    return time.monotonic() - start


def read_seconds(folder: Path) -> float:
    """Seconds to read all weights once from the disk, not from its cache."""
    forget(folder)
    buffer = bytearray(16 << 20)
    start = time.monotonic()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.monotonic() - start


def forget(folder: Path) -> None:
    """Drop the files of a folder from the system's cache, where it can."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check(folder: Path, config: dict, length: int, tokens: int) -> bool:
    """Run all checks, print a line for each, and say whether all hold."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.monotonic()
    plain, fp8 = write_models(folder, config, device)
    print(
        f"model: {config['num_hidden_layers']} layers, {plain.bytes / 1e9:.2f} GB in bf16, "
        f"{fp8.bytes / 1e9:.2f} GB in FP8, written in {time.monotonic() - start:.1f} s"
    )
    text = dict(tokens=tokens, length=length, dtype="bfloat16")
    # The first run of a process starts CUDA and its libraries, which took longer than the text.
    run(plain.folder, folder / "first", batch=tokens // length, **text)
    whole = run(plain.folder, folder / "whole", batch=tokens // length, **text)
    show("uncapped", whole, whole)
    total = plain.bytes
    cap = f"{CAP}GiB" if config["hidden_size"] == 4096 else "3MB"
    elsewhere = {
        "the rest in main memory": f"0={cap},cpu=200GiB",
        "the rest on disk": f"0={cap}",
    }
    if device == "cpu":
        elsewhere = {"the rest on disk": f"cpu={cap}"}
    good = True
    for number, (name, limits) in enumerate(elsewhere.items()):
        forget(plain.folder)
        spread = run(
            plain.folder, folder / str(number), device_map="auto", max_memory=limits, **text
        )
        difference = largest_difference(spread, whole)
        fits = spread.resident + spread.fetched <= CAP * GIB and len(spread.places) > 1
        good = good and difference <= TOLERANCE and fits
        show(f"{cap} on the device, {name}", spread, whole, difference)
        moved = total - spread.resident
        print(
            f"  {moved / 1e9:.2f} GB elsewhere: one copy to the GPU takes "
            f"{copy_seconds(moved, pinned=False):.2f} s "
            f"({copy_seconds(moved, pinned=True):.2f} s from pinned memory)"
        )
    print(
        f"  one read of all {total / 1e9:.2f} GB from the disk: {read_seconds(plain.folder):.2f} s"
    )
    quantized = run(fp8.folder, folder / "quantized", batch=tokens // length, **text)
    difference = largest_difference(quantized, whole)
    show("FP8, dequantized while it loads", quantized, whole, difference)
    return good and 1e-6 < difference < 0.3


def show(name: str, run: Run, whole: Run, difference: float | None = None) -> None:
    """Print one line."""
    content = run.artifact.content["run"]
    peak, resident, fetched = run.peak / GIB, run.resident / GIB, run.fetched / GIB
    apart = "" if difference is None else f", statistics {difference:.1e} apart"
    print(
        f"{name}: {run.seconds:.1f} s ({run.seconds / whole.seconds:.2f} x uncapped), of which "
        f"check and text {run.text_seconds:.2f} s ({run.text_seconds / whole.text_seconds:.2f} x), "
        f"batch {content['batch']}, peak {peak:.2f} GiB with {resident:.2f} GiB of weights "
        f"resident and at most {fetched:.2f} fetched{apart}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="a folder on a local disk")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    config = dict(SMALL if arguments.small else QWEN3_8B)
    if arguments.layers:
        config["num_hidden_layers"] = arguments.layers
    length, tokens = (256, 2048) if arguments.small else (2048, 32768)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="check-offload-") as folder:
        good = check(Path(folder), config, length, tokens)
    print(f"{'all checks hold' if good else 'FAILED'} ({time.monotonic() - start:.0f} s)")
    sys.exit(not good)


if __name__ == "__main__":
    main()
