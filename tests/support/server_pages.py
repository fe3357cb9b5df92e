"""A server with one layer, without vLLM: requests that take its pages, step by step."""

import torch

from rotationzoo.artifact.fit import fit
from rotationzoo.codec.attention import Scores
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.geometry import Layer
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.rotations import SIDES
from rotationzoo.sides import LATENTS
from rotationzoo.vllm import segments
from rotationzoo.vllm.latents import LatentPages, LatentReader
from rotationzoo.vllm.pages import LayerPages
from rotationzoo.vllm.prompts import LayerReader, TorchAttention
from rotationzoo.vllm.segments import HostMetadata
from rotationzoo.vllm.settings import cell_bytes
from rotationzoo.vllm.steps import Planner
from support.caches import with_means, with_transforms
from support.float64 import to_float64

HEADS, DIM, TOKENS = 2, 16, 8
GEOMETRY = [Layer(0, 0, 4, HEADS, DIM, DIM)]
ROPE = 8
OF_LATENTS = [Layer(0, 0, 4, 1, DIM, DIM, rope_dim=ROPE)]


def settings_of(format="vllm", sink=3, recent=6, kernel=False, geometry=GEOMETRY) -> CacheSettings:
    """With transform coding in `segments`, and else with the nearest codes."""
    rotations, rounding = with_means(fit(None, PRESETS["random"], geometry)), "nearest"
    if format == "segments":
        rotations, rounding = with_transforms(rotations), "transform"
    if not kernel:
        rotations = to_float64(rotations)
    layout = CacheLayout(SIMULATED[format], sink, recent, prefill_layout="window")
    return CacheSettings(RotatedCodec(rotations, rounding=rounding), layout, block=8)


class Server:
    """A server with one layer, whose requests take pages in no order."""

    def __init__(
        self,
        settings,
        most_requests=4,
        pages=40,
        tokens=TOKENS,
        device="cpu",
        dtype=torch.float32,
        segment=segments.SHORT,
        verified=1,
    ):
        self.tokens, self.threshold = tokens, max(segments.DECODE_THRESHOLD, verified)
        rotation, kinds, beside = settings.codec.rotations[0].key, (LayerPages, LayerReader), 0
        if settings.codec.rotations.cached is LATENTS:
            kinds, beside = (LatentPages, LatentReader), ROPE
        heads, dim = len(rotation.clip), rotation.dim
        cell = cell_bytes(settings, dim + beside, 0, dtype.itemsize)
        cache = torch.zeros(pages, heads, tokens, cell, dtype=torch.uint8, device=device)
        like = torch.zeros(1, heads, 1, dim, device=device)
        held = tokens, pages, most_requests, cache.device
        self.planner = Planner(settings.layout, *held, segment, verified)
        attention = TorchAttention()
        attention.segment = segment
        settings = settings.for_layer(0, like, like)
        self.layer = kinds[0](settings, 0, cache, self.planner.slots, dtype)
        self.reader = kinds[1](self.layer, attention)
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.free, self.tables, self.lengths = order.tolist(), {}, {}
        self.device, self.dtype = device, dtype

    def begin(self, request, prefix_of=None, pages=0) -> None:
        """Let a request begin, with pages of another one."""
        self.tables[request] = self.tables.get(prefix_of, [])[:pages]
        self.lengths[request] = pages * self.tokens

    def take(self, request, tokens: int) -> None:
        """Give a request pages for this number of tokens."""
        pages = self.tables[request]
        while len(pages) * self.tokens < tokens:
            pages.append(self.free.pop(0))

    def end(self, request) -> None:
        self.free += self.tables.pop(request)

    def plan(self, counts: dict):
        """Plan a step with these numbers of new tokens."""
        table, mapping = torch.zeros(len(counts), WIDTH, dtype=torch.int32), []
        tokens, read, filled = self.tokens, set(), set()
        for row, (request, count) in enumerate(counts.items()):
            pages, start = self.tables[request], self.lengths[request]
            self.lengths[request] = end = start + count
            self.take(request, end)
            read.update(pages[: start // tokens])
            filled.update(pages[start // tokens :])
            table[row, : len(pages)] = torch.tensor(pages)
            mapping += [pages[at // tokens] * tokens + at % tokens for at in range(start, end)]
        lengths = torch.tensor([self.lengths[request] for request in counts])
        new, most = torch.tensor([*counts.values()]), int(lengths.max())
        host = HostMetadata(new, lengths, most, self.threshold, meets=not read.isdisjoint(filled))
        numbers = [lengths.int(), host.counts.int(), torch.tensor(mapping)]
        return self.planner.plan(*(each.to(self.device) for each in (table, *numbers)), host)

    def plan_padding(self, tokens: int):
        """Plan the step of a graph's batch whose new tokens belong to nobody."""
        none, padding = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), -1)
        table, host = torch.zeros(tokens, WIDTH, dtype=torch.int32), HostMetadata(none + 1, none, 1)
        return self.planner.plan(table, none, none, padding, host)

    def run(self, rows: dict) -> dict:
        """One step: request -> its new rows of each side `[T, H, D]`; and what each reads. As in
        vLLM, requests with few new tokens come first."""
        rows = dict(sorted(rows.items(), key=lambda item: len(item[1]["key"]) > self.threshold))
        step = self.plan({request: len(each["key"]) for request, each in rows.items()})
        both = {
            side: torch.cat([each[side] for each in rows.values()]).to(self.device, self.dtype)
            for side in SIDES
        }
        query = torch.cat([query_of(each["key"]) for each in rows.values()])
        query = query.to(self.device, self.dtype)
        output = query.new_full((*query.shape[:2], both["value"].shape[2]), torch.nan)
        self.reader.run(step, query, both, SCORES, output)
        parts = output.cpu().split([len(each["key"]) for each in rows.values()])
        return dict(zip(rows, parts, strict=True))


WIDTH, SCORES = 16, Scores(DIM**-0.5)


def query_of(key: torch.Tensor) -> torch.Tensor:
    """Queries `[T, 2 H, D]` that find their token's key."""
    return torch.cat([key, key.flip(1)], 2).view(len(key), -1, key.shape[2]) * 2


def draw(tokens: int, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {side: torch.randn(tokens, heads, dim, generator=generator) for side in SIDES}


def part_of(rows, begin: int, end: int) -> dict[str, torch.Tensor]:
    return {side: each[begin:end] for side, each in rows.items()}
