"""One layer of a vLLM server's step on one GPU: 2-bit codes in the pages of its block manager
("On a GPU" in docs/vllm.md).

    python scripts/bench/benchmark_pages.py [--shapes 1x102400,8x102400,64x32768]
        [--format vllm] [--few 4] [--bits 2.5] [--fall 4] [--others 2000]

The classes of the backend run with synthetic metadata, without a server: a `Planner` plans a step
of requests whose pages are in random order, and a `LayerPages` stores new tokens and reads. Caches
are cold, and the medians are over CUDA graph replays. In the same run:

* `pages, reading`: the decode kernel over the server's pages, windows in slots of the copies;
* `pages, storing`: storing the new tokens, as nearest codes, or by transform coding with
  `--format segments`;
* `pages, whole step`: both at the same time, as in a server;
* `N tokens`: the same for N new tokens of each request, which the decode kernel reads;
* `bf16`: torch's `scaled_dot_product_attention` over contiguous rows, with its fastest kernel.

A shape is requests, tokens of each, query heads, KV heads, channels of a head, and those of an
exact key beside a latent (MLA): with `1x32768x128x1x512x64`, `LatentPages` reads, and `bf16` is
vLLM's kernel for such layers (FlashAttention 3, in pages). So it is with `--others`, where all
requests but the first have so many tokens.

Prompts are measured in a whole vLLM, by serve_engine.py.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from measuring import DEVICE, make_parser
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rotationzoo.artifact.fit import fit
from rotationzoo.budget import Budget
from rotationzoo.codec.attention import Scores
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.codec.formats import BUDGETED, SIMULATED
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.codec.transform import SegmentLayout
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import Layer
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import Rotation
from rotationzoo.vllm.latents import LatentPages, LatentReader
from rotationzoo.vllm.pages import LayerPages
from rotationzoo.vllm.prompts import LayerReader
from rotationzoo.vllm.segments import LONG, HostMetadata
from rotationzoo.vllm.steps import Planner, Step

Launch = Callable[[], object]
COLD = 32
"""Caches are read in turn until this many times the L2 cache has been read, so that at most 3 % of
what a launch reads can still be in it. Overwriting the L2 cache between launches instead would
leave it full of lines that the next launch has to write back."""
_SHORTEST = 2e-3  # seconds of a replay; shorter ones would be timed with the gaps between them
_REPLAYS, _SECONDS = (9, 200), 0.15  # their number, and about how many seconds they take
PAGE, SINK, RECENT = 64, 64, 256


@dataclass(frozen=True)
class Shape:
    """One layer of attention: requests with one new token each."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    rope_dim: int = 0
    others: int | None = None  # tokens of all requests but the first; None: as many

    @property
    def lengths(self) -> list[int]:
        others = self.context if self.others is None else self.others
        return [self.context, *[others] * (self.batch - 1)]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in bfloat16."""
        return 2 * self.kv_heads * (self.dim + (self.rope_dim or self.dim))

    @property
    def bytes(self) -> int:
        """Bytes of the bfloat16 cache, all of which a step reads."""
        return sum(self.lengths) * self.token_bytes


def bound_of(shape: Shape, settings: CacheSettings) -> int:
    """Bytes of codes and exact tokens that a step reads, without padding."""
    exact, of_sides = SINK + RECENT, (sum(layout.row_bytes) for layout in layouts_of(settings))
    packed = sum(of_sides) + 2 * shape.rope_dim
    exact *= shape.batch
    return int((sum(shape.lengths) - exact) * packed + exact * shape.token_bytes)


def layouts_of(settings: CacheSettings) -> list[PageLayout | SegmentLayout]:
    """The pages of keys and values, or of latents."""
    codec, format = settings.codec, settings.layout.format
    return [codec.page_layout(0, side, PAGE, format) for side in codec.rotations.cached.sides]


def random_pages(layout: PageLayout | SegmentLayout, count: int, device: str) -> torch.Tensor:
    """Pages of random codes, uint8 `[count, bytes]`, with the scales of rows of variance 1."""
    pages = torch.randint(0, 256, (count, layout.bytes), dtype=torch.uint8, device=device)
    sections = layout.view(pages)
    if isinstance(sections, list):
        for rows in sections:
            rows[..., 3:4] &= 0xFE  # the highest bit of the number of a scale
        return pages
    sections.scale.uniform_(1.2, 1.8)
    # Both put the middle of the codes near zero.
    low, high = (1.2, 1.8) if layout.format.offset == "zero" else (-2.4, -2.0)
    sections.offset.uniform_(low, high)
    return pages


def settings_of(
    shape: Shape, format: str, bits: float = 2.5, fall: float = 4, device: str = "cuda"
) -> CacheSettings:
    """Random rotations; with transform coding in so many bits in the format `segments`, of channels
    whose deviations fall from 1 to e^-fall: 0 is what random weights have."""
    sizes = shape.heads, shape.kv_heads, shape.dim, shape.dim
    geometry = [Layer(0, 0, *sizes, rope_dim=shape.rope_dim or None)]
    generator = torch.Generator().manual_seed(0)

    def complete(_: int, __: str, rotation: Rotation) -> Rotation:
        # Variances of a trained model fall by some powers of ten, and differ by head.
        heads = 0.2 + torch.rand(shape.kv_heads, 1, generator=generator)
        deviations = heads * torch.linspace(0, -fall, shape.dim).exp()
        costs = deviations.double().square()
        mean = torch.randn(shape.kv_heads, shape.dim, generator=generator)
        return replace(
            rotation, mean=mean, transform=rotation.matrix, deviations=deviations, costs=costs
        )

    rotations, rounding = fit(None, PRESETS["random"], geometry), "nearest"
    if format == BUDGETED:
        rotations = spend_bits(rotations.replace(complete), Budget(bits))
        rounding = "transform"
    layout = CacheLayout(SIMULATED[format], SINK, RECENT, prefill_layout="window")
    like = torch.zeros(1, shape.kv_heads, 1, shape.dim, device=device)
    settings = CacheSettings(RotatedCodec(rotations, rounding=rounding), layout)
    return settings.for_layer(0, like, like)


class Server:
    """Requests with pages in random order."""

    def __init__(self, shape: Shape, settings: CacheSettings, copies: int, verified: int = 1):
        self.shape, self.settings = shape, settings
        each = -(-(shape.context + 1) // PAGE)
        count = shape.batch * each + 1
        layouts, beside = layouts_of(settings), PAGE * shape.rope_dim
        taken = sum(layout.bytes for layout in layouts) + 2 * beside
        cell = -(-taken // (shape.kv_heads * PAGE))
        kind = LatentPages if beside else LayerPages
        self.planner = Planner(
            settings.layout, PAGE, count, shape.batch, torch.device("cuda"), LONG, verified
        )
        self.table = (torch.randperm(count - 1, device="cuda") + 1).view(shape.batch, each)
        self.layers = []
        for _ in range(copies):
            parts = [random_pages(layout, count, "cuda") for layout in layouts]
            parts.append(torch.randn(count, beside, device="cuda").bfloat16().view(torch.uint8))
            padding = cell * shape.kv_heads * PAGE - taken
            filled = torch.nn.functional.pad(torch.cat(parts, 1), (0, padding))
            cache = filled.view(count, shape.kv_heads, PAGE, cell)
            layer = kind(settings, 0, cache, self.planner.slots, torch.bfloat16)
            for copied in layer.copies.values():
                copied.normal_()
            self.layers.append(layer)

    def numbers(self, counts: list[int], lengths: list[int], few: int) -> tuple:
        """The arguments of `plan`: requests get `counts` new tokens, of which `few` are few."""
        rows = len(counts)
        parts = [
            torch.arange(end - count, end, device="cuda")
            for count, end in zip(counts, lengths, strict=True)
        ]
        mapping = torch.cat(
            [self.table[row, at // PAGE] * PAGE + at % PAGE for row, at in enumerate(parts)]
        )
        both = (torch.tensor(each, device="cuda", dtype=torch.int32) for each in (lengths, counts))
        several = torch.tensor(counts), torch.tensor(lengths)
        host = HostMetadata(*several, self.table.shape[1] * PAGE, few)
        return self.table[:rows].int(), *both, mapping, host

    def step(self, new: int, few: int) -> Step:
        """A step with `new` tokens of each request, whose windows have copies."""
        lengths = self.shape.lengths
        before = [length - new for length in lengths]
        self.planner.plan(*self.numbers(before, before, few))
        return self.planner.plan(*self.numbers([new] * len(lengths), lengths, few))


def ways_of(server: Server, new: int) -> dict[str, Callable[[LayerPages], object]]:
    """The parts of a step with `new` tokens of each request that are timed."""
    shape, step, rows = server.shape, server.step(new, new), new * server.shape.batch
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    query, scores = draw(rows, shape.heads, shape.dim + shape.rope_dim), Scores(shape.dim**-0.5)
    key = draw(rows, shape.kv_heads, shape.dim + shape.rope_dim)
    given = {"key": key, "value": draw(rows, shape.kv_heads, shape.dim)}
    output = torch.empty_like(query[..., : shape.dim])
    both, reader = (query, scores, output), LatentReader if shape.rope_dim else LayerReader
    return {
        "reading": lambda layer: layer.attend(step, *both),
        "storing": lambda layer: layer.store(step, given),
        "whole step": lambda layer: reader(layer).run(step, query, given, scores, output),
    }


def time_shape(
    shape: Shape, settings: CacheSettings, few: list[int]
) -> Iterator[tuple[str, float]]:
    """Seconds of each way."""
    server = Server(shape, settings, copies_of(bound_of(shape, settings)), max(few, default=1))
    for name, way in ways_of(server, 1).items():
        yield f"pages, {name}", timed(way, server.layers)
    for new in few:
        yield f"{new} tokens", timed(ways_of(server, new)["whole step"], server.layers)
    del server
    torch.cuda.empty_cache()
    in_pages = shape.rope_dim or shape.others is not None
    yield "bf16", time_pages(shape) if in_pages else time_bfloat16(shape)


def time_pages(shape: Shape) -> float:
    """Seconds of vLLM's kernel for pages."""
    from vllm.v1.attention.backends import fa_utils

    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    each, rank = -(-shape.context // PAGE), shape.dim
    pages = shape.batch * each
    query = draw(shape.batch, shape.heads, rank + shape.rope_dim)
    count = partial(torch.tensor, dtype=torch.int32, device="cuda")
    table = torch.randperm(pages, device="cuda").int().view(shape.batch, -1)
    own = {"max_seqlen_q": 1, "max_seqlen_k": shape.context, "block_table": table, "causal": True}
    own |= {"cu_seqlens_q": count(range(shape.batch + 1)), "fa_version": 3}
    own |= {"seqused_k": count(shape.lengths), "num_splits": 32}  # as in a graph

    def read_latents(cache: torch.Tensor) -> None:
        rows = {"q": query[..., rank:], "k": cache[..., rank:], "v": cache[..., :rank]}
        fa_utils.flash_attn_varlen_func(**rows, **own, q_v=query[..., :rank])

    def read_heads(cache: torch.Tensor) -> None:
        key, value = cache.tensor_split(2, -1)
        fa_utils.flash_attn_varlen_func(q=query, k=key, v=value, **own)

    width = rank + (shape.rope_dim or rank)
    caches = draw(copies_of(shape.bytes), pages, PAGE, shape.kv_heads, width)
    return timed(read_latents if shape.rope_dim else read_heads, list(caches))


def time_bfloat16(shape: Shape) -> float:
    """Seconds of the fastest of torch's kernels over contiguous rows."""
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    query, times = draw(shape.batch, shape.heads, 1, shape.dim), []
    caches = list(draw(copies_of(shape.bytes), 2, shape.bytes // 4))
    for name, way in read_whole(shape):
        try:
            times.append(timed(lambda cache, way=way: way(query, cache), caches))
        except RuntimeError as problem:  # a kernel that this GPU or version lacks
            print(f"{name}: {problem}", flush=True)
    return min(times)


def read_whole(shape: Shape) -> Iterator[tuple[str, Callable[..., None]]]:
    """`scaled_dot_product_attention` of queries `[B, H_q, 1, D]` by two kernels, with keys and
    values `[B, H, T, D]` and `[B, T, H, D]` in memory, and the query heads of a group as queries or
    as heads."""
    heads_first = shape.batch, shape.kv_heads, -1, shape.dim
    tokens_first = shape.batch, -1, shape.kv_heads, shape.dim

    def in_groups(query: torch.Tensor, cache: torch.Tensor) -> None:
        scaled_dot_product_attention(query.view(heads_first), *cache.view(2, *heads_first))

    def in_groups_of_tokens(query: torch.Tensor, cache: torch.Tensor) -> None:
        sides = cache.view(2, *tokens_first).transpose(2, 3)  # tokens before heads in memory
        scaled_dot_product_attention(query.view(heads_first), *sides)

    def in_heads(query: torch.Tensor, cache: torch.Tensor) -> None:
        scaled_dot_product_attention(query, *cache.view(2, *heads_first), enable_gqa=True)

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for way in (in_groups, in_groups_of_tokens, in_heads):
            yield f"{backend.name}, {way.__name__}", sdpa_kernel(backend)(way)


def copies_of(size: int) -> int:
    """How many caches of `size` bytes to read in turn."""
    cold = COLD * torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, -(-cold // size))


def timed(read: Callable[[Any], object], caches: Sequence[Any]) -> float:
    """The median seconds of reading a cache. All caches are read in turn in one CUDA graph, so that
    the CPU's time for launches does not count."""
    launches: list[Launch] = [partial(read, cache) for cache in caches]
    for launch in (launches[0], launches[-1], launches[0]):
        launch()  # compiles and tunes
    once = _elapsed(lambda: _run(launches), 1)[0]
    count = max(1, int(_SHORTEST / once) + 1) if once < _SHORTEST else 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run([*launches] * count)
    replay = graph.replay
    once = _elapsed(replay, 2)[-1]
    least, most = _REPLAYS
    times = _elapsed(replay, min(most, max(least, int(_SECONDS / once))))
    return statistics.median(times) / len(launches) / count


def _run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


def _elapsed(work: Launch, repeats: int) -> list[float]:
    """Seconds of each repetition. Nothing waits for the GPU before the last is launched."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]


def bandwidth(size: int = 2 << 30) -> float:
    """Bytes per second of the fastest of torch's reductions that read `size` bytes."""
    source = torch.randn(size // 4, device="cuda")
    rows = source.view(-1, 1 << 16)
    half = source.view(torch.bfloat16).view(-1, 1 << 16)
    by_row = partial(rows.sum, 1), partial(rows.amax, 1), partial(half.amax, 1)
    reductions = source.sum, source.amax, *by_row
    return max(size / timed(lambda reduce: reduce(), [reduction]) for reduction in reductions)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default="1x102400,8x102400,64x32768")
    parser.add_argument("--format", default="vllm")
    parser.add_argument("--bits", type=float, default=2.5, help="an element in segments")
    parser.add_argument("--fall", type=float, default=4, help="of deviations, in powers of e")
    parser.add_argument("--others", type=int, help="tokens of all requests but the first")
    parser.add_argument("--few", type=int, nargs="*", default=[4], help="new tokens of a request")
    args = parser.parse_args()
    if DEVICE != "cuda":
        parser.error("there is no NVIDIA GPU")
    rate, device = bandwidth(), torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {rate / 1e12:.2f} TB/s", flush=True)
    with torch.inference_mode():
        for name in args.shapes.split(","):
            shape = replace(Shape(*map(int, name.split("x"))), others=args.others)
            settings = settings_of(shape, args.format, args.bits, args.fall)
            times = time_shape(shape, settings, args.few)
            result = {way: 1e6 * seconds for way, seconds in times}
            result["bound"] = 1e6 * bound_of(shape, settings) / rate
            print(json.dumps({name: result}), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
