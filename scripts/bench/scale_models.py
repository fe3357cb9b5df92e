"""Models of published sizes with random weights, made on the device, and what benchmarks of them
share: random text, FLOPs, peak memory, and the matrix product that the device can do at best."""

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
_LOOK = 0.005  # seconds between two looks at the memory of this process


@dataclass(frozen=True)
class Shape:
    """The geometry of a Qwen3 model, from the `config.json` at `source`.

    `experts` is 0 for a dense model. Otherwise each token passes `active` of them, and
    `intermediate` is the width of one.
    """

    source: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    experts: int = 0
    active: int = 1
    dim: int = 128
    vocabulary: int = 151_936

    def config(self) -> Qwen3Config | Qwen3MoeConfig:
        """The config of transformers' model of this shape."""
        common = dict(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        )
        if not self.experts:
            return Qwen3Config(intermediate_size=self.intermediate, **common)
        return Qwen3MoeConfig(
            moe_intermediate_size=self.intermediate,
            num_experts=self.experts,
            num_experts_per_tok=self.active,
            norm_topk_prob=True,
            **common,
        )

    @property
    def matrix_weights(self) -> int:
        """The entries of the matrices of a layer that a token is multiplied by."""
        attention = 2 * self.hidden * self.dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts
        return attention + router + self.active * 3 * self.hidden * self.intermediate

    def forward_flops(self, rows: int, length: int) -> float:
        """FLOPs of the decoder without its head on `rows` rows of `length` tokens: two a weight and
        token, and `q k^T` and `s v` for each pair of positions that the causal mask shows."""
        pairs = length * (length + 1) / 2
        attention = 4 * self.heads * self.dim * pairs
        return self.layers * rows * (2 * self.matrix_weights * length + attention)

    def moment_flops(self, rows: int, length: int) -> float:
        """FLOPs of the second moments of queries, outputs, keys and values of these rows."""
        heads = 2 * (self.heads + self.kv_heads)
        return self.layers * rows * length * heads * 2 * self.dim**2


# From config.json of these models on huggingface.co.
SHAPES = {
    "8b": Shape("Qwen/Qwen3-8B", 36, 4096, 12_288, 32, 8),
    "32b": Shape("Qwen/Qwen3-32B", 64, 5120, 25_600, 64, 8),
    "30b-a3b": Shape("Qwen/Qwen3-30B-A3B", 48, 2048, 768, 32, 4, experts=128, active=8),
    # As a Qwen3, which normalizes queries and keys: the matrices and the cache are Llama's.
    "70b": Shape("meta-llama/Llama-3.3-70B-Instruct", 80, 8192, 28_672, 64, 8, vocabulary=128_256),
}


def shape_of(name: str, layers: int | None = None) -> Shape:
    """A published shape, with fewer layers if asked for."""
    shape = SHAPES[name]
    return shape if layers is None else replace(shape, layers=layers)


def make_model(
    shape: str | Shape,
    layers: int | None = None,
    device: str = DEVICE,
    dtype: torch.dtype = DTYPE,
    seed: int = 0,
    gpus: int = 1,
) -> PreTrainedModel:
    """transformers' own model of a shape, in eval mode, with random weights. With several `gpus`,
    accelerate spreads it over them, each with as many successive layers.

    It is built on `meta` and filled on the device, so that no copy exists anywhere, in no other
    type. Each matrix keeps the variance of what it multiplies, and norms have weight 1; the
    router's scores are those of random tokens, so that all experts get about as many.
    """
    chosen = shape_of(shape, layers) if isinstance(shape, str) else shape
    config = chosen.config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    places = _spread(chosen.layers, gpus) if gpus > 1 else {"": device}
    for name, place in places.items():
        model.get_submodule(name).to_empty(device=place)
    model.eval()
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                weight.fill_(1)
            else:
                # Each token's embedding has entries of about 1: it is to matter in every layer.
                place = weight.device  # with its index, which `device` may lack
                if place not in generators:
                    generators[place] = torch.Generator(place).manual_seed(seed)
                deviation = 1.0 if "embed_tokens" in name else 1 / math.sqrt(weight.shape[-1])
                weight.normal_(std=deviation, generator=generators[place])
    # Its buffers are computed from the config when it is made, and `meta` computes nothing.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(model.device)
    model.requires_grad_(False)
    return model if gpus == 1 else dispatch_model(model, places)


def _spread(layers: int, gpus: int) -> dict[str, str]:
    """Module -> GPU: the embeddings on the first, the head on the last."""
    last = f"cuda:{gpus - 1}"
    ends = {
        "model.embed_tokens": "cuda:0",
        "model.rotary_emb": "cuda:0",
        "model.norm": last,
        "lm_head": last,
    }
    return ends | {
        f"model.layers.{layer}": f"cuda:{layer * gpus // layers}" for layer in range(layers)
    }


def random_text(
    shape: str | Shape, rows: int, length: int, device: str = DEVICE, seed: int = 1
) -> torch.Tensor:
    """Token ids `[rows, length]`, all equally probable."""
    chosen = SHAPES[shape] if isinstance(shape, str) else shape
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(chosen.vocabulary, (rows, length), generator=generator, device=device)


def weight_bytes(model: PreTrainedModel) -> int:
    return sum(weight.numel() * weight.itemsize for weight in model.parameters())


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(job: Callable[[], object]) -> float:
    """How long a job takes, until the device is done with it."""
    synchronize()
    start = time.perf_counter()
    job()
    synchronize()
    return time.perf_counter() - start


def interleave(jobs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The seconds of each job. The jobs take turns, forwards and backwards, so that a device that
    gets warmer is as warm for each of them. A first, untimed turn pays for what is set up once."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats):
        names = list(jobs)[:: 1 if turn % 2 == 0 else -1]
        for name in names:
            times[name].append(seconds_of(jobs[name]))
    return times


def median_ratio(times: Mapping[str, list[float]], job: str, base: str) -> float:
    """How many times as long a job took as another in the same turn: the median of all turns."""
    pairs = zip(times[job], times[base], strict=True)
    return statistics.median(seconds / plain for seconds, plain in pairs)


@dataclass
class Peak:
    """The most memory of a block of code, in bytes: allocated on the device, and resident on the
    host. `host_before` was resident when the block began."""

    device: int = 0
    host: int = 0
    host_before: int = 0


@contextmanager
def measure_peak() -> Iterator[Peak]:
    """Measure the peak of a block. The host's is looked at every 5 ms, because not every kernel
    lets a process forget the peak it had before."""
    peak = Peak(host_before=resident_bytes())
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(_LOOK):
            peak.host = max(peak.host, resident_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        stopped.set()
        watcher.join()
        peak.host = max(peak.host, resident_bytes())
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            peak.device = torch.cuda.max_memory_allocated()


def resident_bytes() -> int:
    """The memory of this process that is in RAM, without files that are only mapped."""
    status = Path("/proc/self/status").read_text()
    sizes = dict(line.split(":", 1) for line in status.splitlines())
    name = "RssAnon" if "RssAnon" in sizes else "VmRSS"  # the first is missing in some sandboxes
    return int(sizes[name].split()[0]) * 1024


def matmul_peak(size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a large bf16 matrix product on the device, the fastest of five runs."""
    if DEVICE == "cpu":
        size, repeats = min(size, 512), 2
    left, right = (torch.randn(size, size, dtype=DTYPE, device=DEVICE) for _ in range(2))
    output = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(repeats):
            torch.matmul(left, right, out=output)

    multiply()
    fastest = min(seconds_of(multiply) for _ in range(5))
    return 2 * size**3 * repeats / fastest
