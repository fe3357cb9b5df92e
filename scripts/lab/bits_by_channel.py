"""Bits by channel beside today's budget, on DEV alone: which keeps more in the same bytes?

    python scripts/lab/bits_by_channel.py MODEL ROTATIONS --json OUT [--arms PATTERN ...]

MODEL is a folder of `real_models` or of the lab; ROTATIONS is what `calibrate MODEL` made. Options
are those of `scripts/bench/real_models_lose.py`, which measures the arms: answers of DEV that are
kept, their nats, and the KL of plain text. Every scale counts.

A row `k` loses `e' M e` by the error `e`, where `M` is a moment of queries (for values, of outputs
or of the output projection). With the covariance `S` of centered rows, `A = M^(1/2)` and the
eigenvectors `B` of `A S A`, the channels of `(k - mean) A B` do not correlate, and each loses its
squared error. Bits go to segments of 8 channels where they save most (reverse water-filling), over
all layers, sides and heads, weighed by what each layer and side was seen to lose. A row has one
scale, the one of a few that leaves the smallest error. This is transform coding.

The arms, each in several budgets of bits:

    today       error feedback, the budget of `calibrate --bits`; `by` what the other arms measure
    feedback    the same with 0, 1, 2, 3, 4 or 8 bits for each layer and side, or for each KV head
    channels    bits by channel, weighed by answers, by text, and by both
    damping     M damped by more than .01
    key         M of all queries alike; at least as large as both moments; or as each cluster's
    value       the metric of the output projection in place of the outputs'
    chained     error feedback over segments of different widths, in the eigenbasis of S
    heads       other bytes for each KV head
    three       segments of 3 bits, too
    floor       at least one bit for every channel
    free        any width for any channel of any head
    scales      a scale of 4 and 8 bits a row in place of 3
"""

import copy
import fnmatch
import heapq
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lab_rows import bundled_texts

sys.path.append(str(Path(__file__).parents[1] / "bench"))  # scripts are no package
import real_models_lose as lose
from real_models_lose import DEV, TASKS, Place, Run, Study, elements_of

from rotationzoo.artifact.store import Artifact
from rotationzoo.budget import Budget
from rotationzoo.codec.bit_allocation import spend_bits
from rotationzoo.codec.int2 import Format
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.errors import RotationZooError
from rotationzoo.geometry import cached_layers
from rotationzoo.model.capture import Call, decoder, intercept
from rotationzoo.model.prediction import run_decoder
from rotationzoo.rotations import Rotation
from rotationzoo.simulation.simulated import SimulatedCodec

WIDTHS = (1, 2, 4, 8)
FREE = (1, 2, 3, 4, 5, 6, 8)
SEGMENT = 8
STEPS = (1.0, 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""The best step of a Gaussian of deviation 1 with so many bits (Max 1960), and 1 for none."""
LEFT = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.000304, 0.000087)
"""What such codes leave of its variance."""
DAMPING = 0.01
SAMPLED, CLUSTERS, TURNS = 256, 4, 20
"""Queries of a row and head that are clustered, their clusters, and turns of k-means."""
GRADIENT_TOKENS, ASKED = 3072, 64
"""Tokens of a row that gradients run through, and the questions of each task asked for them."""
QUERIES = 1024
"""Queries whose attention is computed at a time."""
BUDGETS = (1.75, 2.0, 2.25, 2.5, 2.75, 3.0)
USUAL, AROUND = 2.25, (2.0, 2.25, 2.5)
"""The budgets of arms that change one thing."""


@dataclass
class Sums:
    """What calibration sums up at one place, float64 `[H, D, D]` and `[H, D]`."""

    second: torch.Tensor
    first: torch.Tensor
    metrics: dict[str, torch.Tensor]
    count: int = 0
    sample: list[torch.Tensor] = field(default_factory=list)
    """Queries `[H, N, D]`, each times the root of its Fisher weight."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens predicted for `text` and `answers`."""

    def lost(self, name: str) -> float:
        """Nats, in some unit, that the rows lose where nothing is stored."""
        mean = self.first / self.count
        spread = self.second / self.count - mean[:, :, None] * mean[:, None]
        return (self.metrics[name] * spread).sum().item()


def collect(study: Study, rows: torch.Tensor) -> dict[Place, Sums]:
    """Read rows `[N, T]`, exact. The metrics of keys are `mean`, of all queries, and `fisher`, of
    queries weighted by the sum of `p (1 - p)` over what they read from codes; those of values are
    `output` and `projection`."""
    layers = {layer.index: layer for layer in cached_layers(study.geometry)}
    sums: dict[Place, Sums] = {}
    device, sink = study.model.device, study.cache.sink

    def start(layer: int, side: str, kinds: Sequence[str]) -> Sums:
        heads, dim = layers[layer].kv_heads, layers[layer].dims[side]
        zero = torch.zeros(heads, dim, dim, dtype=torch.float64, device=device)
        return Sums(zero.clone(), zero[..., 0].clone(), {kind: zero.clone() for kind in kinds})

    def read(call: Call) -> torch.Tensor:
        output = call.run()
        if call.layer not in layers:
            return output
        keys = sums.setdefault((call.layer, "key"), start(call.layer, "key", ("mean", "fisher")))
        values = (call.layer, "value")
        sums.setdefault(values, start(*values, ("output", "projection")))
        for side, stored in (("key", call.key), ("value", call.value)):
            its, part = sums[call.layer, side], stored[:, :, sink:].transpose(0, 1).flatten(1, 2)
            its.second += part.double().mT @ part.double()
            its.first += part.double().sum(1)
            its.count += part.shape[1]
        heads = call.key.shape[1]
        queries = call.query.unflatten(1, (heads, -1))[0].double()  # [H, G, T, D]
        weights = _fisher_weights(call, study)
        flat, weight = queries.flatten(1, 2), weights.unflatten(0, (heads, -1)).flatten(1)
        keys.metrics["mean"] += flat.mT @ flat
        keys.metrics["fisher"] += (flat * weight[..., None]).mT @ flat
        some = torch.randperm(flat.shape[1], device=device)[:SAMPLED]
        keys.sample.append(flat[:, some] * weight[:, some, None].sqrt())
        written = output[0].transpose(0, 1).unflatten(0, (heads, -1)).flatten(1, 2).double()
        sums[values].metrics["output"] += written.mT @ written
        return output

    torch.manual_seed(0)
    with torch.no_grad(), intercept(study.model, read):
        for row in rows:
            run_decoder(study.model, row[None])
    collect_gradients(study, rows, sums)
    for layer, module in _attention_modules(study).items():
        values, its = sums[layer, "value"], layers[layer]
        weight = module.o_proj.weight.detach().double()  # [hidden, H G D]
        by_head = weight.unflatten(1, (its.kv_heads, -1, its.dims["value"])).permute(1, 2, 3, 0)
        values.metrics["projection"] += (by_head @ by_head.mT).sum(1)
    return sums


@dataclass
class Probe:
    """What a `Simulation` asks of a codec that stores rows as they are, and lets the gradient of
    what is read of them be asked for."""

    zeros: dict[Place, torch.Tensor] = field(default_factory=dict)
    token_group: int = 1

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: Format
    ) -> torch.Tensor:
        self.zeros[layer, side] = torch.zeros_like(rows, requires_grad=True)
        return rows + self.zeros[layer, side]

    def stored_bits(self, layer: int, side: str, dim: int, format: Format) -> float:
        return 16.0


def collect_gradients(study: Study, rows: torch.Tensor, sums: dict[Place, Sums]) -> None:
    """Add the metrics `text` and `answers`: twice the nats a token that an error loses, as the
    second moment of the gradients, at the stored rows, of log probabilities of tokens that the
    model itself draws (its Fisher information). `text` is of `rows`, `answers` of DEV's prompts
    that no arm is judged by."""
    study.model.requires_grad_(False)
    first, options = study.cache.first_quantized, study.options
    texts = rows.unflatten(1, (-1, GRADIENT_TOKENS)).flatten(0, 1)
    for text in texts:
        _add_gradients(study, text, [slice(first, len(text) - 1)], "text", sums, 2)
    asked = range(options.questions + options.few, options.questions + options.few + ASKED)
    for task in TASKS:
        for prompt in study._write(DEV, task, study.length, asked):
            at = [slice(q.answer.start - 1, q.answer.stop - 1) for q in prompt.questions]
            _add_gradients(study, prompt.ids, at, "answers", sums, 4)
    for its in sums.values():
        for name in ("text", "answers"):
            its.metrics[name] /= its.tokens[name]


def _add_gradients(
    study: Study,
    ids: torch.Tensor,
    positions: Sequence[slice],
    name: str,
    sums: dict[Place, Sums],
    draws: int,
) -> None:
    """Add the gradients' second moment of some positions of a row of token ids."""
    probe = Probe()
    with torch.enable_grad():
        with study.reading(probe):
            states = run_decoder(study.model, ids[None])
        last = states.output.last_hidden_state
        part = copy.copy(states.output)
        part["last_hidden_state"] = leaf = last.detach().requires_grad_()
        copied = replace(states, output=part)
        places = [*probe.zeros]
        for draw in range(draws):
            leaf.grad = None
            for at in positions:
                for begin in range(at.start, at.stop, 256):
                    block = slice(begin, min(begin + 256, at.stop))
                    logs = copied.logits(block)[0].float().log_softmax(-1)
                    drawn = torch.multinomial(logs.detach().exp(), 1)
                    logs.gather(1, drawn).sum().backward()
            found = torch.autograd.grad(
                last, [probe.zeros[place] for place in places], leaf.grad, draw + 1 < draws
            )
            for place, gradient in zip(places, found, strict=True):
                of = gradient[0].double()
                metrics = sums[place].metrics
                metrics[name] = metrics.get(name, 0) + of.mT @ of / draws
    for place in places:
        tokens = sum(at.stop - at.start for at in positions)
        sums[place].tokens[name] = sums[place].tokens.get(name, 0) + tokens


def _attention_modules(study: Study) -> dict[int, torch.nn.Module]:
    modules = decoder(study.model).modules()
    return {each.layer_idx: each for each in modules if hasattr(each, "o_proj")}


def _fisher_weights(call: Call, study: Study) -> torch.Tensor:
    """The sum of `p (1 - p)` over the quantized past `[H_q, T]`, float64, of a batch of one."""
    scale, window = (call.attend.options.get(name) for name in ("scaling", "sliding_window"))
    heads, length = call.query.shape[1:3]
    keys = call.key[0].repeat_interleave(heads // call.key.shape[1], 0)
    places, found = torch.arange(length, device=keys.device), []
    for part in places.split(QUERIES):
        scores = call.query[0, :, part] @ keys.mT * (scale or keys.shape[-1] ** -0.5)
        back = part[:, None] - places[None]
        hidden = (back < 0) | (back >= (window or length))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        stored = (places[None] >= study.cache.sink) & (back >= study.cache.recent)
        found.append((weights * (1 - weights) * stored).sum(-1).double())
    return torch.cat(found, dim=1)


def cover_clusters(sums: Sums) -> torch.Tensor:
    """The least metric that loses at least what each cluster of queries loses, `[H, D, D]`: those
    of the sample that point the same way, with the cluster's mean weight."""
    rows, metrics = torch.cat(sums.sample, dim=1), []
    for head in rows:
        way = torch.nn.functional.normalize(head, dim=-1)
        centers = way[torch.linspace(0, len(way) - 1, CLUSTERS).long()]
        for _ in range(TURNS):
            nearest = (way @ centers.mT).argmax(-1)
            means = [way[nearest == number].sum(0) for number in range(CLUSTERS)]
            centers = torch.nn.functional.normalize(torch.stack(means), dim=-1)
        cover = head.mT @ head / len(head)
        for number in range(CLUSTERS):
            mine = head[nearest == number]
            cover = cover_both(cover, mine.mT @ mine / max(1, len(mine)))
        metrics.append(cover)
    return torch.stack(metrics)


def cover_both(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The smallest matrix in the basis that diagonalizes both that is at least as large as each."""
    damped = first + 1e-6 * first.diagonal(dim1=-2, dim2=-1).mean() * torch.eye(
        len(first), dtype=first.dtype, device=first.device
    )
    lower = torch.linalg.cholesky(damped)
    half = torch.linalg.solve_triangular(lower, second, upper=False)
    values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(lower, half.mT, upper=False))
    root = lower @ vectors
    return root * values.clamp_min(1) @ root.mT


@dataclass(frozen=True)
class Basis:
    """The coordinates of one place, float64: `y = (row - mean) forward`."""

    forward: torch.Tensor
    inverse: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor
    """Of each channel, `[H, D]`."""
    loss: torch.Tensor
    """What a channel of no bits loses, `[H, D]`."""
    factor: torch.Tensor | None = None
    """For error feedback: unit upper triangular, `[H, D, D]`."""


def make_basis(
    sums: Sums,
    metric: torch.Tensor,
    damping: float,
    side: str,
    chained: float | None,
    scaled: bool,
) -> Basis:
    """The basis of a metric `[H, D, D]`, where no channels correlate. `chained`: the eigenbasis of
    the rows, the strongest channel last, with a factor; bits are shared out by the metric with this
    damping, so that single queries count for more than they do in the factor."""
    mean = sums.first / sums.count
    if side == "value":
        mean = torch.zeros_like(mean)
    spread = sums.second / sums.count - mean[:, :, None] * mean[:, None]
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    eye = torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    damped = (metric + metric.mT) / 2 / size + damping * eye
    scale = size[..., 0] if scaled else 1.0
    if chained is not None:
        variances, forward = torch.linalg.eigh(spread)
        variances, rotated = variances.clamp_min(1e-12), forward.mT @ damped @ forward
        factor, _ = _factor(rotated)
        _, weights = _factor(rotated + (chained - damping) * eye)
        loss = variances * weights * scale
        return Basis(forward, forward.mT, mean, variances.sqrt(), loss, factor)
    values, vectors = torch.linalg.eigh(damped)
    root = vectors * values.clamp_min(1e-9).sqrt()[:, None] @ vectors.mT
    variances, basis = torch.linalg.eigh(root @ spread @ root)
    forward, variances = root @ basis, variances.clamp_min(1e-12)
    inverse = torch.linalg.inv(forward)
    return Basis(forward, inverse, mean, variances.sqrt(), variances * scale)


def _factor(metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`U` and `d` `[H, D]` of `U diag(d) U' = metric`: `U` is unit upper triangular."""
    upper = torch.linalg.cholesky(metric.flip(-2, -1)).flip(-2, -1)
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    return upper / diagonal[:, None], diagonal.square()


def mix(basis: Basis, bits: torch.Tensor) -> Basis:
    """The basis with channels of equal width turned into each other at random, which gives them the
    same variance. `bits`: `[H, D]`."""
    turn = torch.zeros_like(basis.forward)
    generator = torch.Generator().manual_seed(1)
    for head, its in enumerate(bits):
        for width in its.unique().tolist():
            place = (its == width).nonzero()[:, 0]
            drawn = torch.randn(len(place), len(place), generator=generator, dtype=torch.float64)
            turn[head, place[:, None], place] = torch.linalg.qr(drawn)[0].to(turn.device)
    variance = (turn.square() * basis.deviation.square()[..., None]).sum(-2)
    forward, inverse = basis.forward @ turn, turn.mT @ basis.inverse
    return replace(basis, forward=forward, inverse=inverse, deviation=variance.sqrt())


def spend(losses: torch.Tensor, total: float, widths: Sequence[int], least: int) -> torch.Tensor:
    """The widths `[N]` of segments whose losses without bits these are, which take `total` widths
    together: each next width goes where it saves most a bit, from `least` on."""
    ladder = [width for width in (0, *widths) if width >= least]
    following, loss = dict(itertools.pairwise(ladder)), losses.tolist()
    bits, left = [ladder[0]] * len(loss), total - ladder[0] * len(loss)
    heap: list[tuple[float, int, int]] = []

    def offer(number: int) -> None:
        now = bits[number]
        if now in following:
            then = following[now]
            saved = loss[number] * (LEFT[now] - LEFT[then]) / (then - now)
            heapq.heappush(heap, (-saved, number, then))

    for number in range(len(loss)):
        offer(number)
    while heap:
        _, number, then = heapq.heappop(heap)
        if then - bits[number] <= left + 1e-9:
            left -= then - bits[number]
            bits[number] = then
            offer(number)
    return torch.tensor(bits)


def _round_totals(means: Sequence[float], heads: Sequence[int], segment: int) -> list[float]:
    """The widths of a row's segments together, so that it takes a multiple of two bytes. All rows
    together take no more than before; those that lose most by it are rounded up."""
    unit = 16 / segment
    totals = [mean // unit * unit for mean in means]
    left = sum(count * (mean - it) for mean, it, count in zip(means, totals, heads, strict=True))
    for place in sorted(range(len(means)), key=lambda each: totals[each] - means[each]):
        if left + 1e-9 >= unit * heads[place] and means[place] > totals[place]:
            totals[place] += unit
            left -= unit * heads[place]
    return totals


@dataclass(frozen=True)
class ChannelCodec:
    """What a `Simulation` asks of a codec that stores `bits` `[H, D]` at each place."""

    bases: Mapping[Place, Basis]
    bits: Mapping[Place, torch.Tensor]
    scale_bits: int = 3
    token_group: int = 1

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        return rows

    def stored_bits(self, layer: int, side: str, dim: int, format: Format) -> float:
        if (layer, side) not in self.bits:
            return 16.0
        return self.bits[layer, side].double().mean().item() + self.scale_bits / dim

    def layers(self, geometry: object) -> set[int]:
        return {layer for layer, _ in self.bits}

    @property
    def ratios(self) -> list[float]:
        """The scales of a row: evenly spaced logarithms from .5 to 2.8."""
        count = min(2**self.scale_bits, 32)
        return [0.5 * 5.6 ** (number / (count - 1)) for number in range(count)]

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: Format
    ) -> torch.Tensor:
        if (layer, side) not in self.bits:
            return rows
        basis, bits = self.bases[layer, side], self.bits[layer, side].to(rows.device)
        flat = rows.transpose(0, 1).flatten(1, 2).float() - basis.mean[:, None].float()
        channels = flat @ basis.forward.float()
        table = torch.tensor(STEPS, device=rows.device)[bits] * basis.deviation.float()
        steps, half = table[:, None], (2.0**bits / 2)[:, None]
        kept = (bits > 0)[:, None].float()
        best, chosen = None, channels
        for ratio in self.ratios:
            read, errors = _round(channels, steps * ratio, half, kept, basis.factor)
            if best is None:
                best, chosen = errors, read
            better = errors < best
            best = torch.where(better, errors, best)
            chosen = torch.where(better[..., None], read, chosen)
        back = chosen @ basis.inverse.float() + basis.mean[:, None].float()
        return back.unflatten(1, (len(rows), -1)).transpose(0, 1).to(rows.dtype)


def _round(
    channels: torch.Tensor,
    steps: torch.Tensor,
    half: torch.Tensor,
    kept: torch.Tensor,
    factor: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels `[H, N, D]` as they are read, and the loss `[H, N]` of each row. The levels lie in
    the middle of their steps. With a factor, a channel's target takes up the errors before it."""

    def level(target: torch.Tensor, part: slice) -> torch.Tensor:
        step, most = steps[..., part], half[..., part]
        code = (target / step).floor().maximum(-most).minimum(most - 1)
        return (code + 0.5) * step * kept[..., part]

    if factor is None:
        read = level(channels, slice(None))
        return read, (read - channels).square().sum(-1)
    read, weights = torch.empty_like(channels), factor.float()
    errors = torch.zeros_like(channels)
    loss = channels.new_zeros(channels.shape[:2])
    for channel in range(channels.shape[-1]):
        part = slice(channel, channel + 1)
        moved = errors[..., :channel] @ weights[:, :channel, part]
        read[..., part] = level(channels[..., part] - moved, part)
        errors[..., part] = read[..., part] - channels[..., part]
        loss += (errors[..., part] + moved)[..., 0].square()
    return read, loss


@dataclass(frozen=True)
class Sharing:
    """How bits are shared out."""

    widths: Sequence[int] = WIDTHS
    segment: int = SEGMENT
    """Channels that have one width."""
    alike: bool = True
    """Whether all heads of a place take as many bytes."""
    least: int = 0
    whole: bool = False
    """Whether each head takes a multiple of two bytes."""


USUALLY = Sharing()


@dataclass
class Planner:
    """Makes the arms from what was summed up and from what single places were seen to lose."""

    study: Study
    run: Run
    sums: Mapping[Place, Sums]
    artifact: Artifact
    covers: dict[Place, torch.Tensor] = field(default_factory=dict)

    def bases(
        self,
        key: str = "fisher",
        value: str = "output",
        damping: float = DAMPING,
        chained: float | None = None,
        answers: float = 0.5,
    ) -> dict[Place, Basis]:
        metrics, made = {"key": key, "value": value}, {}
        sizes = {
            name: sum(its.lost(name) for its in self.sums.values()) for name in ("text", "answers")
        }
        for place, its in self.sums.items():
            kind = metrics[place[1]]
            if kind == "clusters" and place not in self.covers:
                self.covers[place] = cover_clusters(its)
            metric = self.covers[place] if kind == "clusters" else its.metrics.get(kind)
            if kind == "nats":
                metric = its.metrics["text"] / sizes["text"]
                metric = (1 - answers) * metric + answers * its.metrics["answers"] / sizes["answers"]
            if kind == "both":  # at least each of two, of one trace
                pair = [its.metrics[name] for name in ("mean", "fisher")]
                pair = [m / m.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] for m in pair]
                metric = torch.stack([cover_both(*each) for each in zip(*pair, strict=True)])
            scaled = kind == "nats" or place[1] == "key"
            made[place] = make_basis(its, metric, damping, place[1], chained, scaled)
        return made

    def weights(self, bases: Mapping[Place, Basis], by: str) -> dict[Place, float]:
        """Nats a unit of each place's own loss: by `answers`, by `text`, or by `both`. They are
        measured with 2 bits at that place and all else exact, in the usual bases."""
        usual, found = self.usual, dict[Place, dict[str, float]]()
        if by == "nats":
            return dict.fromkeys(bases, 1.0)
        for place, basis in bases.items():
            bits = self.share({place: usual[place]}, {place: 1.0}, 2.0, Sharing(alike=False))
            name = f"2 bits of {place[1]}s of layer {place[0]}"
            told = self.run.measure_few(name, ChannelCodec(usual, bits))
            if told is None:
                sys.exit("no time is left to measure what single places lose")
            bits = self.share({place: basis}, {place: 1.0}, 2.0, Sharing(alike=False))
            left = torch.tensor(LEFT, dtype=torch.float64)[bits[place]].to(basis.loss.device)
            lost = (basis.loss * left).sum().item()
            answers, text = max(told["kl_of_answers"], 1e-5), max(told["kl"], 1e-7)
            found[place] = {"answers": answers / lost, "text": text / lost, "lost": lost}
        sizes = {
            name: sum(its[name] * its["lost"] for its in found.values())
            for name in ("answers", "text")
        }
        if by != "both":
            return {place: its[by] for place, its in found.items()}
        return {
            place: its["answers"] / sizes["answers"] + its["text"] / sizes["text"]
            for place, its in found.items()
        }

    def share(
        self,
        bases: Mapping[Place, Basis],
        weights: Mapping[Place, float],
        budget: float,
        way: "Sharing",
    ) -> dict[Place, torch.Tensor]:
        """The bits `[H, D]` of every place, of so many code bits an element on average."""
        segment, widths, least = way.segment, way.widths, way.least
        losses = {
            place: (basis.loss * weights[place]).unflatten(1, (-1, segment)).mean(-1).cpu()
            for place, basis in bases.items()
        }
        flat = torch.cat([loss.flatten() for loss in losses.values()])
        chosen = spend(flat, budget * len(flat), widths, least)
        parts = chosen.split([loss.numel() for loss in losses.values()])
        shares = [part.view(loss.shape) for part, loss in zip(parts, losses.values(), strict=True)]
        if way.whole:
            flat = [head for its in shares for head in its.sum(-1).tolist()]
            totals = iter(_round_totals(flat, [1] * len(flat), segment))
            for number, loss in enumerate(losses.values()):
                heads = [spend(head, next(totals), widths, least) for head in loss]
                shares[number] = torch.stack(heads)
        if way.alike:
            means = [its.sum(-1).double().mean().item() for its in shares]
            totals = _round_totals(means, [its.numel() // its.shape[1] for its in shares], segment)
            for number, (loss, total) in enumerate(zip(losses.values(), totals, strict=True)):
                heads = [spend(head, total, widths, least) for head in loss]
                shares[number] = torch.stack(heads)
        bits = {}
        for place, its in zip(losses, shares, strict=True):
            bits[place] = its.repeat_interleave(segment, -1)
        return bits

    def by_channel(
        self,
        budget: float,
        by: str = "both",
        bases: Mapping[Place, Basis] | None = None,
        scale_bits: int = 3,
        way: Sharing = USUALLY,
    ) -> ChannelCodec:
        """Bits by channel, of so many bits an element in all."""
        bases = self.usual if bases is None else bases
        places = elements_of(self.study.geometry)
        rows = sum(len(basis.loss) for basis in bases.values())
        code_bits = budget - scale_bits * rows / sum(places.values())
        bits = self.share(bases, self.weights(bases, by), code_bits, way)
        if all(basis.factor is None for basis in bases.values()):
            bases = {place: mix(basis, bits[place]) for place, basis in bases.items()}
        return ChannelCodec(bases, bits, scale_bits)

    def today(self, budget: float, by: str | None = None) -> RotatedCodec:
        """Error feedback with the budget that `calibrate --bits` spends: by the sensitivities of
        the artifact, or by those that the other arms measure."""
        group_size, rotations = self.artifact.recipe.group_size, self.artifact.rotations
        if by is not None:
            losses = self.place_losses(by, (2,))

            def measured(layer: int, side: str, rotation: Rotation) -> Rotation:
                return replace(rotation, sensitivity=torch.tensor(losses[layer, side][2]))

            rotations = rotations.replace(measured)
        rotations = spend_bits(rotations, Budget(bits=budget), group_size)
        return RotatedCodec(rotations, group_size, rounding="feedback")

    def place_losses(self, by: str, widths: Sequence[int]) -> dict[Place, dict[int, float]]:
        """What error feedback loses with so many bits at each place and all else exact, by
        `answers`, by `text`, or by `both`, each in parts of the sum of 2 bits."""
        told: dict[str, dict[Place, dict[int, float]]] = {"kl_of_answers": {}, "kl": {}}
        for place, width in itertools.product(elements_of(self.study.geometry), widths):
            name = f"{width} fed-back bits of {place[1]}s of layer {place[0]}"
            found = self.run.measure_few(name, WidthCodec(self.frames, {place: width}))
            if found is None:
                sys.exit("no time is left to measure what single places lose")
            for measure, its in told.items():
                its.setdefault(place, {})[width] = found[measure]
        measures = {"answers": ["kl_of_answers"], "text": ["kl"]}.get(by, [*told])
        sums = {name: sum(its[2] for its in told[name].values()) for name in measures}
        return {
            place: {w: sum(told[name][place][w] / sums[name] for name in measures) for w in widths}
            for place in told["kl"]
        }

    def by_place(self, budget: float, by: str, each_head: bool = False) -> "WidthCodec":
        """Error feedback with 0, 1, 2, 3, 4 or 8 bits for each layer and side, or for each of its
        KV heads, which lose as much of the place's loss as they would without any bits. Each bit
        after the second leaves a quarter."""
        elements, losses = elements_of(self.study.geometry), self.place_losses(by, (0, 1, 2))
        heads = {place: len(basis.loss) for place, basis in self.usual.items()}
        rows = sum(heads.values())
        left = budget * sum(elements.values()) - 16 * rows
        ladder = (0, 1, 2, 3, 4, 8)
        parts: dict[tuple[Place, int], dict[int, float]] = {}
        for place, its in losses.items():
            its |= {width: its[2] / 4 ** (width - 2) for width in (3, 4, 8)}
            share = [1.0]
            if each_head:
                lost = self.usual[place].loss.sum(-1)
                share = (lost / lost.sum()).tolist()
            for head, part in enumerate(share):
                parts[place, head] = {width: its[width] * part for width in ladder}
        bits = dict.fromkeys(parts, 0)
        sizes = {
            (place, head): elements[place] // (heads[place] if each_head else 1)
            for place, head in parts
        }

        def best_step(part: tuple[Place, int]) -> tuple[float, int]:
            """The saving a bit of the best wider code, and its width: losses need not be convex."""
            now, loss = bits[part], parts[part]
            steps = [
                ((loss[now] - loss[then]) / (then - now) / sizes[part], then)
                for then in ladder
                if then > now and (then - now) * sizes[part] <= left
            ]
            return max(steps, default=(0.0, now))

        while True:
            part = max(bits, key=lambda each: best_step(each)[0])
            saving, width = best_step(part)
            if saving <= 0:
                break
            left -= (width - bits[part]) * sizes[part]
            bits[part] = width
        widths = {place: tuple(bits[its] for its in parts if its[0] == place) for place in losses}
        return WidthCodec(self.frames, widths)

    @cached_property
    def usual(self) -> dict[Place, Basis]:
        return self.bases()

    @cached_property
    def frames(self) -> dict[Place, lose.Frame]:
        return lose.frames_of(self.artifact.rotations, self.study.model.device)

    def arms(self) -> Iterator[tuple[str, Callable[[], SimulatedCodec]]]:
        """The names of all arms and how to make them, those that decide first."""
        for budget in BUDGETS:
            yield f"today {budget:g}", partial(self.today, budget)
            yield f"channels both {budget:g}", partial(self.by_channel, budget)
        for by, budget in itertools.product(("answers", "text", "both"), (*AROUND, 3.0)):
            yield f"today by {by} {budget:g}", partial(self.today, budget, by)
        for by, budget in itertools.product(("answers", "text"), AROUND):
            yield f"channels {by} {budget:g}", partial(self.by_channel, budget, by)
        changes: list[dict[str, Any]] = [{"damping": each} for each in (0.1, 0.3, 1.0)]
        changes += [{"key": each} for each in ("mean", "both", "clusters")]
        changes += [{"chained": each} for each in (0.01, 0.1, 0.3, 1.0)]
        changes += [{"key": "clusters", "damping": 0.3}, {"value": "projection"}]
        for change, budget in itertools.product(changes, AROUND[1:]):
            words = ", ".join(f"{name} {value}" for name, value in change.items())
            yield f"{words} {budget:g}", partial(self._changed, budget, **change)
        ways = {
            "heads": Sharing(alike=False),
            "three": Sharing((1, 2, 3, 4, 8)),
            "floor": Sharing(least=1),
            "free": Sharing(FREE, 1, alike=False),
        }
        for (name, way), budget in itertools.product(ways.items(), AROUND[1:]):
            yield f"{name} {budget:g}", partial(self.by_channel, budget, way=way)
        ways |= {
            "whole": Sharing(FREE, 1, alike=False, whole=True),
            "planes": Sharing(FREE, alike=False),
            "fours": Sharing(FREE, 4, alike=False),
            "whole alike": Sharing(FREE, 1),
        }
        bys = {"both": 0.5, "text": 0.0, "answers": 1.0, "text more": 0.2}
        for (word, part), (name, way) in itertools.product(bys.items(), ways.items()):
            for budget, damping in itertools.product((2.0, *AROUND[1:], 3.0), (0.01, 0.1, 0.3, 1)):
                words = f"nats {word}, {name}, damping {damping} {budget:g}"
                given = {"key": "nats", "value": "nats", "answers": part, "damping": damping}
                yield words, partial(self._changed, budget, "nats", way, **given)
                yield (
                    f"weighed {words}",
                    partial(self._changed, budget, "both", way, **given),
                )
        for name, budget in itertools.product(("whole", "planes"), AROUND[1:]):
            for change in changes:
                words = ", ".join(f"{name} {value}" for name, value in change.items())
                made = partial(self._changed, budget, "both", ways[name], **change)
                yield f"{name}, {words} {budget:g}", made
            for by in ("text", "answers"):
                yield f"{name} {by} {budget:g}", partial(
                    self._changed, budget, by, ways[name]
                )
            yield f"{name} {budget:g}", partial(self._changed, budget, "both", ways[name])
        for bits in (4, 8):
            yield f"scales {bits} {USUAL:g}", partial(self.by_channel, USUAL, scale_bits=bits)
        for by, budget in itertools.product(("answers", "text", "both"), AROUND[1:]):
            yield f"feedback {by} {budget:g}", partial(self.by_place, budget, by)
            yield f"feedback heads {by} {budget:g}", partial(self.by_place, budget, by, True)

    def _changed(
        self, budget: float, by: str = "both", way: Sharing = USUALLY, **changed: Any
    ) -> ChannelCodec:
        return self.by_channel(budget, by, self.bases(**changed), way=way)


@dataclass(frozen=True)
class WidthCodec(lose.PlannedCodec):
    """Error feedback with 0 bits, which leave the mean, and 1 bit as well; each KV head may have
    its own."""

    bits: Mapping[Place, Any]

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: Format
    ) -> torch.Tensor:
        if (layer, side) not in self.bits:
            return rows
        bits, frame = self._widths(layer, side), self.frames[layer, side]
        if len(bits) < rows.shape[1]:
            bits = bits * rows.shape[1]
        read = rows.clone()
        for width in {*bits}:
            its = [head for head, each in enumerate(bits) if each == width]
            stored = read_narrow(frame, rows, width) if width < 2 else frame.read(rows, width)
            read[:, its] = stored[:, its]
        return read

    def stored_bits(self, layer: int, side: str, dim: int, format: Format) -> float:
        if (layer, side) not in self.bits:
            return 16.0
        widths = self._widths(layer, side)
        return sum(widths) / len(widths) + 16 / dim

    def _widths(self, layer: int, side: str) -> tuple[int, ...]:
        bits = self.bits[layer, side]
        return bits if isinstance(bits, tuple) else (bits,)


def read_narrow(frame: lose.Frame, rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows `[B, H, T, D]` in 1 bit by error feedback, with the best of a few scales, or in none."""
    if bits == 0:
        return frame.mean.expand_as(rows).to(rows.dtype)
    flat = (rows.float() - frame.mean).transpose(0, 1).flatten(1, 2)
    channels = (flat.unflatten(1, (len(rows), -1)).transpose(0, 1) @ frame.forward).transpose(0, 1)
    channels = channels.flatten(1, 2)
    size = channels.square().mean(-1, keepdim=True).sqrt()
    diagonal = frame.factor.diagonal(dim1=-2, dim2=-1)
    unit = frame.factor.triu(1) + torch.eye(len(diagonal[0]), device=diagonal.device)
    weight = diagonal[:, None].sqrt()
    best, chosen = None, channels
    for ratio in (0.8, 1.1, 1.4, 1.7, 2.1):
        ones = torch.ones_like(channels[:, :1])
        # In units of the row, so that one step suits all of them.
        read, _ = _round(channels / size, ones * ratio, ones, ones, unit)
        errors = read - channels / size
        loss = ((errors @ unit) * weight).square().sum(-1) * size[..., 0].square()
        if best is None:
            best, chosen = loss, read * size
        chosen = torch.where((loss < best)[..., None], read * size, chosen)
        best = torch.minimum(loss, best)
    back = chosen.unflatten(1, (len(rows), -1)).transpose(0, 1) @ frame.inverse + frame.mean
    return back.to(rows.dtype)


def main() -> int:
    parser = lose.make_options()
    parser.description = __doc__
    parser.add_argument("--arms", nargs="+", default=["*"], help="their names, in this order")
    parser.add_argument("--calibration", default="8x6144", help="rows and their tokens")
    parser.add_argument("--sums", type=Path, help="what calibration summed up, made if missing")
    options, begun = parser.parse_args(), time.perf_counter()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    (artifact,) = (Artifact.open(folder) for folder in options.rotations)
    study = Study(options)
    run = Run(study, options, begun)
    count, length = map(int, options.calibration.split("x"))
    ids = study.tokenizer("\n".join(bundled_texts("calibration")))["input_ids"][: count * length]
    if options.sums and options.sums.exists():
        sums = torch.load(options.sums, weights_only=False)
    else:
        sums = collect(study, torch.tensor(ids, device=study.model.device).view(count, length))
        if options.sums:
            torch.save(sums, options.sums)
    print(f"{lose.DEVICE}, ready after {time.perf_counter() - begun:.0f} s", flush=True)
    planner = Planner(study, run, sums, artifact)
    run.head("Bits by channel and today's budget")
    arms = dict(planner.arms())
    for name in dict.fromkeys(
        name for pattern in options.arms for name in fnmatch.filter(arms, pattern)
    ):
        if not run.is_over:
            try:
                run.measure(name, arms[name]())
            except RotationZooError as error:
                print(f"{name}: {error}")
    print(f"\n{time.perf_counter() - begun:.0f} s{', cut short' if run.is_over else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
