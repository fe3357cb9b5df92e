"""The self-check before a server's first request: its pages against the definition in torch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any

import torch

from rotationzoo.codec.attention import attend_rows
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError, as_unavailable
from rotationzoo.sides import LATENT, LATENTS
from rotationzoo.vllm.pages import Rows
from rotationzoo.vllm.plugin import OTHER_VERSION

FURTHEST = 0.25
"""The largest allowed distance from the definition, as a fraction of what quantization changes. The
demo model has 0.001 in float32 and 0.05 in bfloat16; another layer's rotations make it 1.05."""
MOST = 512  # tokens of a prompt, whatever the windows are
LAYERS = 8  # that are checked: in torch, the codes of one take 10 to 20 ms a side
CHUNK, FEW = 16, 3  # new tokens of the last two steps; the last `CHUNK` queries are compared


class LayerRun:
    """Runs the steps of one request in a layer of vLLM's, in the last blocks of its cache."""

    def __init__(self, config: Any, name: str, spec: Any):
        layer = self.layer = config.compilation_config.static_forward_context[name]
        self.cache, self.impl, device = layer.kv_cache, layer.impl, layer.kv_cache.device
        self.block = self.cache.shape[-2]
        self._made_with = spec.copy_with_new_block_size(self.block), [name], config, device
        self.settings: CacheSettings = self.impl.own_settings()
        self.has_latents = self.settings.codec.rotations.cached is LATENTS
        self.dtype: torch.dtype = config.model_config.dtype
        self.max_tokens = (len(self.cache) - 1) * self.block  # vLLM does not use block 0

    def draw(self, tokens: int, random: torch.Generator) -> tuple[torch.Tensor, Rows]:
        """Queries and rows of a request, on the CPU."""
        impl = self.impl
        key = torch.randn(tokens, impl.num_kv_heads, impl.head_size, generator=random)
        if self.has_latents:
            value = key[..., : impl.rank]
        else:
            value = torch.randn(key.shape, generator=random)
        query = torch.randn(tokens, impl.num_heads, impl.query_size, generator=random)
        return query.to(self.dtype), {"key": key.to(self.dtype), "value": value.to(self.dtype)}

    def expand(self, latents: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values `[1, H_q, T, D]` of latents `[1, 1, T, R]` and what keys have behind
        them `[1, 1, T, R + rope channels]`, as this layer computes them."""
        rows = latents[0, 0], key[0, 0, :, latents.shape[-1] :]
        heads = self.impl.expand(*(each.to(self.cache.device, self.dtype) for each in rows))
        return [each.float().cpu().transpose(0, 1)[None] for each in heads]

    def step(self, start: int, query: torch.Tensor, rows: Rows, alone: bool) -> torch.Tensor:
        """Store new `rows` `[T, H, D]` from this position on, and return the attention output of
        their queries `[T, H_q, D]`. `alone`: no token before them has an exact copy."""
        from rotationzoo.vllm.upstream import CommonAttentionMetadata

        if alone:
            self._builder = self.layer.attn_backend.get_builder_cls()(*self._made_with)
        count, end, place = len(query), start + len(query), self.cache.device
        position, length = torch.arange(start, end), torch.tensor([end], dtype=torch.int32)
        bounds = torch.tensor([0, count], dtype=torch.int32)
        blocks = len(self.cache) - 1 - torch.arange(-(-end // self.block))
        mapping = blocks[position // self.block] * self.block + position % self.block
        common = CommonAttentionMetadata(
            *(bounds.to(place), bounds, length.to(place), 1, count, count, end),
            block_table_tensor=blocks[None].int().to(place),
            slot_mapping=mapping.to(place),
            seq_lens_cpu_upper_bound=length,
        )
        step = self._builder.build(0, common)
        query, key, value = (each.to(place) for each in (query, rows["key"], rows["value"]))
        output = query.new_empty(count, self.impl.num_heads, self.impl.value_size)
        if self.has_latents:
            new = value[:, 0], key[..., value.shape[-1] :]
            self.impl.do_kv_cache_update(*new)
            self.layer.forward_impl(query, *new, self.cache, step, output.flatten(1))
        else:
            self.impl.forward(self.layer, query, key, value, self.cache, step, output)
        return output.cpu()


@torch.no_grad()
def check_pages(config: Any, stored: dict[int, str], kv_cache_config: Any) -> float:
    """Check at most `LAYERS` of the layers `stored` in 2 bits, by number: the first, with whole
    windows, the last, and some between. Returns the largest distance. Raises as `check_layer`, and
    if vLLM's hooks are not as expected."""
    specs: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs |= {name: of_layers.get(name, group.kv_cache_spec) for name in group.layer_names}
    step = -(-(len(stored) - 1) // (LAYERS - 1)) or 1
    layers, furthest = sorted(stored), [0.0]
    with as_unavailable("vLLM does not call this backend as it expects", hint=OTHER_VERSION):
        for layer in layers[:-1:step] + layers[-1:]:
            run = LayerRun(config, stored[layer], specs[stored[layer]])
            furthest.append(check_layer(run, layer, CHUNK if len(furthest) > 1 else MOST))
    said = "%d layers are stored in 2 bits, %.3f from the definition (at most %.2f is allowed)"
    getLogger("vllm.rotationzoo").info(said, len(layers), max(furthest), FURTHEST)
    return max(furthest)


def check_layer(run: LayerRun, layer: int, most: int) -> float:
    """Run a request in one layer: a prompt of at most `most` tokens, then a token that reads exact
    windows and codes, then a chunk and a few tokens that read only codes before them. Returns the
    largest distance of a step from the definition, which is computed on the CPU. Raises
    `RotationZooError` if that is too far. Leaves the pages unchanged."""
    random, later = torch.Generator().manual_seed(layer), 1 + CHUNK + FEW
    layout = run.settings.layout
    wanted = layout.sink + layout.recent + 2 * CHUNK
    prompt = min(wanted, most, run.max_tokens - later)
    kept = run.cache[-(-(prompt + later) // run.block) * -1 :]
    before = kept.clone()
    queries, rows = run.draw(prompt + later, random)
    definition = Definition(run, layer, rows)
    distances = []
    for start, end, exact in definition.steps(prompt):
        new, alone = slice(start, end), start == 0 or end - start > FEW
        parts = {side: each[new] for side, each in rows.items()}
        output = run.step(start, queries[new], parts, alone)
        read, first = output[-CHUNK:].float(), max(start, end - CHUNK)
        distances.append(definition.distance(read, queries[first:end], first, exact))
    kept.copy_(before)
    if too_far := [each for each in distances if not each <= FURTHEST]:  # also for NaN
        problem = f"layer {layer} does not read what was stored in its pages"
        far = f"it is {too_far[0]:.2f} of what quantization changes from the definition"
        hint = "check the kernels on this machine: rotationzoo validate ROTATIONS"
        raise RotationZooError(f"{problem}: {far}", hint)
    return max(distances)


class Definition:
    """The attention of a request's tokens, in plain torch on the CPU."""

    def __init__(self, run: LayerRun, layer: int, rows: Rows):
        _, heads, dim = rows["value"].shape
        like = torch.zeros(1, heads, 1, dim)
        codec = run.settings.for_layer(layer, like, like).codec
        self.layout, self.scores = run.settings.layout, run.impl.scores
        if (sinks := self.scores.sinks) is not None:
            self.scores = replace(self.scores, sinks=sinks.float().cpu())
        given = {side: each.float().transpose(0, 1)[None] for side, each in rows.items()}
        store = partial(codec.fake_quantize, layer=layer, format=self.layout.format)
        if run.has_latents:
            key, latents = given.values()
            self.exact = run.expand(latents, key)
            self.stored = run.expand(store(latents, side=LATENT), key)
            return
        self.exact = [codec.keep_exact(each, layer, side) for side, each in given.items()]
        self.stored = [store(each, side=side) for side, each in given.items()]

    def steps(self, prompt: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The begin and end of each step, and which tokens its queries read exact `[T, L]`."""
        position = torch.arange(self.exact[0].shape[2])
        sink, recent = self.layout.sink, self.layout.recent
        yield 0, prompt, position >= 0
        yield prompt, prompt + 1, (position < sink) | (position > prompt - recent)
        begin = prompt + 1
        yield begin, begin + CHUNK, position >= begin
        own = torch.arange(begin + CHUNK, len(position))[:, None]
        yield begin + CHUNK, len(position), (position >= begin) & (position > own - recent)

    def distance(
        self, output: torch.Tensor, queries: torch.Tensor, first: int, exact: torch.Tensor
    ) -> float:
        """The distance of the `output` of queries `[T, H_q, D]` from position `first` on, as a
        fraction of what quantization changes. `exact` `[T, L]`: tokens that they read exact."""
        position = torch.arange(self.exact[0].shape[2])
        causal = position <= torch.arange(first, first + len(queries))[:, None]
        query = queries.float().transpose(0, 1)[None]
        key, value = (torch.cat(pair, 2) for pair in zip(self.exact, self.stored, strict=True))
        mask = torch.cat([causal & exact, causal & ~exact], 1)[None]
        expected = attend_rows(query, key, value, mask, self.scores)[0][0].transpose(0, 1)
        key, value = self.exact
        unquantized = attend_rows(query, key, value, causal[None], self.scores)[0][0]
        changed = (unquantized.transpose(0, 1) - expected).norm()
        # If nothing is read from codes, only the model's dtype makes a difference.
        return float((output - expected).norm() / (changed + expected.norm() / 20))
