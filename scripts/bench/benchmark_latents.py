"""One layer with latents (MLA) of a decoding step of a vLLM server, on one GPU ("Latents" in
docs/vllm.md). It needs vLLM.

    python scripts/bench/benchmark_latents.py [--shapes 1x32768x128,32x32768x128]
        [--format segments] [--bits 2.5]

A shape is requests, tokens of each and query heads, of latents of 512 channels with 64 exact ones.
As in benchmark_pages.py, caches are cold, and medians are those of CUDA graph replays. In the same
run: reading and storing by `LatentPages`, and reading a bfloat16 cache by vLLM's own kernel for
such layers (FlashAttention 3).
"""

import json
from collections.abc import Iterator
from functools import partial

import torch
from benchmark_pages import (
    PAGE,
    Server,
    Shape,
    bandwidth,
    copies_of,
    random_pages,
    settings_of,
    timed,
)
from measuring import DEVICE, make_parser
from vllm.v1.attention.backends import fa_utils

from rotationzoo.codec.attention import Scores
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.sides import LATENT
from rotationzoo.vllm.latents import LatentPages

RANK, ROPE = 512, 64
KEY = RANK + ROPE
SCALE = 192**-0.5


class LatentServer(Server):
    """Requests of one length, whose pages lie in no order."""

    def _make_layer(self, count: int) -> LatentPages:
        layout = self.settings.codec.page_layout(0, LATENT, PAGE, self.settings.layout.format)
        rope = torch.randn(count, PAGE * ROPE, dtype=torch.bfloat16, device="cuda")
        parts = random_pages(layout, count, "cuda"), rope.view(torch.uint8)
        pages = torch.cat(parts, 1)
        cell = -(-pages.shape[1] // PAGE)
        filled = torch.nn.functional.pad(pages, (0, cell * PAGE - pages.shape[1]))
        cache = filled.view(count, 1, PAGE, cell)
        return LatentPages(self.settings, 0, cache, self.planner.slots, torch.bfloat16)


def time_shape(shape: Shape, settings: CacheSettings) -> Iterator[tuple[str, float]]:
    """Seconds of each way."""
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    tokens, query = shape.batch * shape.context, draw(shape.batch, shape.heads, KEY)
    output, key = query.new_empty(shape.batch, shape.heads, RANK), draw(shape.batch, 1, KEY)
    server = LatentServer(shape, settings, copies_of(tokens * 300))
    step = server.step(1, 1)
    reading = (step, query, Scores(SCALE), output)
    yield "reading", timed(lambda layer: layer.attend(*reading), server.layers)
    given = {"key": key, "value": key[..., :RANK]}
    yield "storing", timed(lambda layer: layer.store(step, given), server.layers)
    del server
    torch.cuda.empty_cache()
    pages = shape.context // PAGE
    caches = list(draw(copies_of(tokens * 2 * KEY), shape.batch * pages, PAGE, 1, KEY))
    table = torch.randperm(shape.batch * pages, device="cuda").int().view(shape.batch, pages)
    count = partial(torch.tensor, dtype=torch.int32, device="cuda")
    own = {
        "cu_seqlens_q": count(range(shape.batch + 1)),
        "seqused_k": count([shape.context] * shape.batch),
        "block_table": table,
        "max_seqlen_q": 1,
        "max_seqlen_k": shape.context,
        "softmax_scale": SCALE,
        "causal": True,
        "fa_version": 3,
        "num_splits": 32,  # vLLM's most in a graph
    }

    def read(cache: torch.Tensor) -> None:
        rows = {"q": query[..., RANK:], "q_v": query[..., :RANK]}
        rows |= {"k": cache[..., RANK:], "v": cache[..., :RANK]}
        fa_utils.flash_attn_varlen_func(**rows, **own)

    yield "bf16", timed(read, caches)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default="1x32768x128,32x32768x128,1x32768x16,32x32768x16")
    parser.add_argument("--format", default="segments")
    parser.add_argument("--bits", type=float, default=2.5, help="an element in segments")
    args = parser.parse_args()
    if DEVICE != "cuda":
        parser.error("there is no NVIDIA GPU")
    rate, device = bandwidth(), torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {rate / 1e12:.2f} TB/s", flush=True)
    with torch.inference_mode():
        for name in args.shapes.split(","):
            batch, context, heads = map(int, name.split("x"))
            shape = Shape(batch, context, heads, 1, RANK, rope_dim=ROPE)
            settings = settings_of(shape, args.format, args.bits)
            times = {way: 1e6 * seconds for way, seconds in time_shape(shape, settings)}
            print(json.dumps({name: times}), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
