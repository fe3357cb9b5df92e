"""What loses the answers of a real model: keys, values, layers, heads and bits, one at a time.

    python scripts/bench/real_models_lose.py MODEL ROTATIONS ... [--split dev] [--json OUT]

MODEL is a folder of `real_models`; ROTATIONS are artifacts with the factors of error feedback. The
first one is measured in every part, and its statistics make a Hadamard and a random arm. Others are
read in part f alone. Parts, in the order in which they run:

    a  keys, values and both, in 2, 3 and 4 bits in all layers
    b  each layer's keys, and each layer's values, in 2 bits, all else exact
    e  the frontier: the same bits for all, and bits shared out by what layers lose in b
    d  4 bits for the keys of the layers that lose most in b, 2 bits for all else
    f  the bits of e with other rotations
    c  each KV head alone, in the layers that lose most in b

Codes are chosen by error feedback, and a row has a float16 scale: `Format.bits` of the format
`fine` without finer channels. Everything is compared with the exact model: answers that it gives
and that are kept, nats of log probability of the right answers, and KL a token on plain text of
2,048 tokens. Parts b and c read fewer questions and rows, always of DEV and none that DEV is judged
on: layers are never chosen on what they are judged by.

--json is written after every arm; arms that it holds already are not measured again. No arm is
begun after --seconds.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from measuring import DEVICE, make_parser

from rotationzoo.artifact.fit import fit
from rotationzoo.artifact.store import Artifact
from rotationzoo.codec import int2
from rotationzoo.codec.budget import COARSE, PER_BIT, SMALLEST
from rotationzoo.codec.feedback import RANGES
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.size import EXACT_BITS
from rotationzoo.geometry import Geometry, cached_layers
from rotationzoo.linalg.moments import sums
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.prediction import HiddenStates, divergence_of, run_decoder
from rotationzoo.model.source import fetch, find
from rotationzoo.recall.answers import Answers, join_answers, read_answers
from rotationzoo.recall.prompts import Prompt
from rotationzoo.rotations import SIDES, Rotations
from rotationzoo.simulation.simulated import Simulation

sys.path.append(str(Path(__file__).parents[1] / "lab"))  # scripts are no package
from real_questions import DEV, LENGTHS, SPLITS, TASKS, Split

Place = tuple[int, str]
"""A layer and a side."""
Bits = Mapping[Place, Sequence[int]]
"""The bits of each KV head of a place; a place that is left out is exact, and so are 16 bits."""
BLOCK = 16
"""Channels whose errors are fed to later blocks together."""
UNIFORM = (2, 3, 4)
BUDGETS, BY_ANSWERS, OTHER_ROTATIONS = (2.25, 2.5, 2.75, 3.0, 3.5), (2.5, 3.0), (2.5, 3.0)
"""Code bits an element: by KL, by answers too, and with other rotations too."""
FEWER_LAYERS = (2, 4, 8, 15)
WORST = 5
"""Layers whose heads are read alone."""
TEXT_LENGTH, FEW_LENGTH = 2048, 2048
MEASURES = {"KL": "kl", "answers": "nats_lost"}
"""By what layers are ranked -> its name in the JSON."""


def feed_back(rows: torch.Tensor, factor: torch.Tensor, format: int2.Format) -> torch.Tensor:
    """Rotated rows `[H, N, D]` as a cache returns them: `feedback.quantize` and `int2.dequantize`
    up to rounding, for one group a row and formats without an offset.

    Sums are in another order, so that a channel takes five operations in place of sixteen, and
    later blocks get the errors of `BLOCK` channels in one product. All is in steps of each range.
    """
    heads, count, dim = rows.shape
    low, high = rows.amin(-1), rows.amax(-1)
    cuts = low.new_tensor([(1 - share) / 2 for share in RANGES])
    cut = (high - low)[:, None] * cuts[:, None]
    ends = (low[:, None] + cut)[..., None], (high[:, None] - cut)[..., None]
    scale = int2.metadata(*ends, format)[0].squeeze(-1)  # [H, ranges, N]
    zero = format.largest_code / 2
    exact = (rows.mT[:, :, None] / scale[:, None] + zero).flatten(2)  # [H, D, ranges * N]
    moved, errors = exact.clone(), torch.empty_like(exact)
    for start in range(0, dim, BLOCK):
        stop = min(start + BLOCK, dim)
        for channel in range(start, stop):
            target, error = moved[:, channel], errors[:, channel]
            # Halves are rounded to the even code, which is the upper one where all channels are 0.
            code = target.round().clamp_(0, format.largest_code)
            torch.sub(code, exact[:, channel], out=error)
            if channel + 1 < stop:
                later = factor[:, channel, channel + 1 : stop, None]
                moved[:, channel + 1 : stop].addcmul_(later, error[:, None], value=-1)
            torch.sub(code, target, out=target)  # what is left of the error
        if stop < dim:
            weights = factor[:, start:stop, stop:].mT.contiguous()
            moved[:, stop:].baddbmm_(weights, errors[:, start:stop], alpha=-1)
    weights = factor.diagonal(dim1=-2, dim2=-1)[:, None]
    costs = (weights @ moved.square_()).view(heads, len(RANGES), count) * scale.square()
    best = costs.argmin(1, keepdim=True)  # [H, 1, N]
    codes = errors.add_(exact).round_().view(heads, dim, len(RANGES), count)
    chosen = codes.gather(2, best[:, None].expand(-1, dim, -1, -1)).squeeze(2)
    return ((chosen - zero) * scale.gather(1, best)).mT


@dataclass(frozen=True)
class Frame:
    """The matrices of one place on the model's device."""

    forward: torch.Tensor
    inverse: torch.Tensor
    factor: torch.Tensor
    mean: torch.Tensor | float

    def read(self, rows: torch.Tensor, bits: Sequence[int]) -> torch.Tensor:
        """Rows `[B, H, T, D]` with so many bits in each KV head, as they are read, with their
        mean. Heads of 16 bits come back as they are."""
        result = rows.clone()
        for number in sorted(set(bits) - {EXACT_BITS}):
            heads = [head for head, its in enumerate(bits) if its == number]
            part = slice(None) if len(heads) == len(bits) else heads
            mean = self.mean if isinstance(self.mean, float) else self.mean[part]
            rotated = (rows[:, part].float() - mean) @ self.forward[part]
            flat = rotated.transpose(0, 1).flatten(1, 2)
            stored = feed_back(flat, self.factor[part], replace(COARSE, bits=number))
            read = stored @ self.inverse[part] + mean
            by_row = read.unflatten(1, (len(rows), -1)).transpose(0, 1)
            result[:, part] = by_row.to(rows.dtype)
        return result


def frames_of(rotations: Rotations, device: torch.device) -> dict[Place, Frame]:
    """Raises `RotationZooError` for rotations without the factors of error feedback."""
    codec, frames = RotatedCodec(rotations, rounding="feedback"), {}
    for layer, side, rotation in rotations.each():
        matrices = codec.forward(layer, side), codec.inverse(layer, side), rotation.feedback
        mean = 0.0 if rotation.mean is None else rotation.mean[:, None].to(device)
        frames[layer, side] = Frame(*(each.to(device).float() for each in matrices), mean)
    return frames


@dataclass(frozen=True)
class PlannedCodec:
    """What a `Simulation` asks of a codec. Rows keep the mean of keys, which a softmax ignores, so
    that exact rows are the model's own."""

    frames: Mapping[Place, Frame]
    bits: Bits
    token_group: int = 1

    def keep_exact(self, rows: torch.Tensor, layer: int, side: str) -> torch.Tensor:
        return rows

    def fake_quantize(
        self, rows: torch.Tensor, layer: int, side: str, format: int2.Format
    ) -> torch.Tensor:
        bits = self.bits.get((layer, side))
        return rows if bits is None else self.frames[layer, side].read(rows, bits)

    def row_range(self, rows: torch.Tensor, layer: int, side: str) -> None:
        return None

    def stored_bits(self, layer: int, side: str, dim: int, format: int2.Format) -> float:
        """With a scale of 16 bits for each head's row."""
        bits = self.bits.get((layer, side), [EXACT_BITS])
        stored = [its + 16 / dim if its < EXACT_BITS else its for its in bits]
        return sum(stored) / len(stored)

    def layers(self, geometry: Geometry) -> set[int]:
        """The layers that read anything in few bits."""
        return {each.index for each in geometry if {(each.owner, s) for s in SIDES} & {*self.bits}}


def elements_of(geometry: Geometry) -> dict[Place, int]:
    """Elements of a token at each place."""
    return {
        (layer.index, side): layer.kv_heads * layer.dims[side]
        for layer in cached_layers(geometry)
        for side in layer.sides
    }


def share_out(
    losses: Mapping[Place, float], elements: Mapping[Place, int], budget: float
) -> dict[Place, int]:
    """2 to 4 bits for each place, of so many code bits an element on average: a bit goes where it
    takes the most of what is left of the losses, of which each bit leaves a quarter."""
    bits = dict.fromkeys(losses, UNIFORM[0])
    least = SMALLEST * sum(max(0.0, loss) for loss in losses.values()) / len(losses)
    left = (budget - UNIFORM[0]) * sum(elements[place] for place in losses) + 1e-6

    def worth(place: Place) -> float:
        gone = max(losses[place], least) * PER_BIT ** (bits[place] - UNIFORM[0])
        return gone / elements[place]

    while able := [p for p in losses if bits[p] < UNIFORM[-1] and elements[p] <= left]:
        best = max(able, key=worth)
        bits[best] += 1
        left -= elements[best]
    return bits


class Study:
    """The exact model's answers and predictions, and those of every arm."""

    def __init__(self, options: argparse.Namespace):
        source = find(str(options.model))
        fetch(source)
        config = loading.load_config(source)
        self.options = options
        self.model = loading.load(source, config, DEVICE, torch.float32)
        self.tokenizer = loading.load_tokenizer(source)
        self.geometry = geometry_of(self.model)
        self.heads = {layer.index: layer.kv_heads for layer in cached_layers(self.geometry)}
        self.cache = CacheLayout(COARSE, options.sink, options.recent)
        split, questions, few = SPLITS[options.split], options.questions, options.few
        asked = range(questions)
        self.prompts = {
            (length, task): self._write(split, task, length, asked)
            for length in options.lengths
            for task in TASKS
        }
        chosen, length = range(questions, questions + few), min(FEW_LENGTH, max(options.lengths))
        self.few = {(length, task): self._write(DEV, task, length, chosen) for task in TASKS if few}
        rows, kept = options.rows, options.few_rows
        self.texts = self._rows(split)[:rows]
        self.few_texts = self._rows(DEV)[rows : rows + kept]
        assert len(self.few_texts) == kept, "DEV has too little text for so many rows"

    def _write(self, split: Split, task: str, length: int, asked: range) -> list[Prompt]:
        return split.prompts(self.tokenizer, task, length, asked, self.cache)

    def _rows(self, split: Split) -> torch.Tensor:
        length = min(TEXT_LENGTH, max(self.options.lengths))
        return torch.tensor(split.rows(self.tokenizer, length))

    def reading(self, codec: PlannedCodec | None) -> Any:
        """The context in which the model reads what a codec stores, or what it computes itself."""
        if codec is None:
            return nullcontext()
        layers = codec.layers(self.geometry)
        return Simulation(codec, self.cache, self.geometry, layers).running(self.model)

    def ask(self, prompts: Mapping[tuple[int, str], list[Prompt]]) -> dict[str, Any]:
        """What was answered, by length and task. All tasks of a length share batches."""
        told: dict[str, Any] = {}
        for length in sorted({length for length, _ in prompts}):
            tasks = {task: its for (of, task), its in prompts.items() if of == length}
            rows = list(itertools.chain.from_iterable(tasks.values()))
            size = max(1, self.options.tokens // length)
            parts = [
                read_answers(self.model, rows[at : at + size], size)
                for at in range(0, len(rows), size)
            ]
            answers, start = join_answers(parts), 0
            told[str(length)] = {}
            for task, its in tasks.items():
                part = slice(start, start := start + sum(len(each.questions) for each in its))
                told[str(length)][task] = _tell(answers, part)
        return told

    def predict(self, texts: torch.Tensor) -> list[HiddenStates]:
        """Of batches of texts `[N, T]`."""
        size = max(1, self.options.tokens // texts.shape[1])
        with torch.no_grad():
            return [run_decoder(self.model, ids) for ids in texts.split(size)]

    @cached_property
    def exact_texts(self) -> dict[bool, list[HiddenStates]]:
        """By whether they are the few."""
        return {few: self.predict(self.few_texts if few else self.texts) for few in (False, True)}

    @torch.no_grad()
    def divergence(self, codec: PlannedCodec, few: bool) -> float:
        """`KL(exact || stored)`, in nats a token, of the queries that read anything in few bits."""
        with self.reading(codec):
            read = self.predict(self.few_texts if few else self.texts)
        total, count, first = 0.0, 0, self.cache.first_quantized
        for exact, stored in zip(self.exact_texts[few], read, strict=True):
            last = exact.ids.shape[1]
            pairs = zip(exact.blocks(first, last), stored.blocks(first, last), strict=True)
            for (_, logits), (_, other) in pairs:
                total += divergence_of(logits, other).double().sum().item()
                count += logits.shape[:2].numel()
        return total / count

    def measure(self, codec: PlannedCodec | None, few: bool) -> dict[str, Any]:
        """The answers and the KL of an arm."""
        with self.reading(codec):
            tasks = self.ask(self.few if few else self.prompts)
        kl = 0.0 if codec is None else self.divergence(codec, few)
        return {"kl": kl, "tasks": tasks}

    def bits(self, codec: PlannedCodec) -> float:
        """Bits an element of the quantized tokens, scales counted; exact sides have 16."""
        elements = elements_of(self.geometry)
        stored = 0.0
        for layer in cached_layers(self.geometry):
            for side in layer.sides:
                its = codec.stored_bits(layer.index, side, layer.dims[side], COARSE)
                stored += elements[layer.index, side] * its
        return stored / sum(elements.values())


def _tell(answers: Answers, part: slice) -> dict[str, Any]:
    digits = map(str, answers.correct[part].int().tolist())
    logs = [round(value, 4) for value in answers.log_probability[part].tolist()]
    return {"correct": "".join(digits), "log_probabilities": logs}


def _pool(told: Mapping[str, Any], length: str | None = None) -> tuple[str, list[float]]:
    """The answers to all questions, or to those of one length."""
    lengths = told if length is None else [length]
    each = [reply for of in lengths for reply in told[of].values()]
    logs = itertools.chain.from_iterable(reply["log_probabilities"] for reply in each)
    return "".join(reply["correct"] for reply in each), list(logs)


def kept_and_nats(
    arm: Mapping[str, Any], exact: Mapping[str, Any], length: str | None = None
) -> tuple[int, int, float]:
    """How many of the exact model's answers an arm gives, how many it gives in all, and the mean
    log probability of the right ones."""
    (mine, logs), (its, _) = _pool(arm["tasks"], length), _pool(exact["tasks"], length)
    kept = sum(pair == ("1", "1") for pair in zip(mine, its, strict=True))
    return kept, mine.count("1"), sum(logs) / len(logs)


class Run:
    """Measures arm after arm, prints a row for each, and keeps all of them in a file."""

    def __init__(self, study: Study, options: argparse.Namespace, begun: float):
        self.study, self.options, self.begun = study, options, begun
        names = ("split", "questions", "lengths", "rows", "few", "few_rows", "sink", "recent")
        settings: dict[str, Any] = {name: getattr(options, name) for name in names}
        settings |= {"model": options.model.name, "tf32": options.tf32}
        settings["rotations"] = [folder.resolve().name for folder in options.rotations]
        self.kept: dict[str, Any] = {"settings": settings, "exact": {}, "arms": {}}
        if options.json and options.json.exists():
            earlier = json.loads(options.json.read_text())
            if earlier["settings"] != settings:
                sys.exit(f"{options.json} holds what was measured with other settings")
            self.kept = earlier
        for few in (False, True):
            name = "few" if few else "judged"
            if name not in self.kept["exact"]:
                self.kept["exact"][name] = study.measure(None, few)
        self.write()

    def exact(self, few: bool) -> dict[str, Any]:
        return self.kept["exact"]["few" if few else "judged"]

    def write(self) -> None:
        if self.options.json:
            part = self.options.json.with_suffix(".part")
            part.write_text(json.dumps(self.kept))
            part.rename(self.options.json)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self.begun > self.options.seconds

    def measure(
        self, name: str, frames: Mapping[Place, Frame], bits: Bits, few: bool = False
    ) -> dict[str, Any] | None:
        """What an arm loses; None where there was no time for it."""
        arms = self.kept["arms"]
        if name not in arms:
            if self.is_over:
                return None
            started, codec = time.perf_counter(), PlannedCodec(frames, bits)
            told = self.study.measure(codec, few)
            logs = [_pool(each["tasks"])[1] for each in (self.exact(few), told)]
            told["nats_lost"] = (sum(logs[0]) - sum(logs[1])) / len(logs[0])
            told |= {"bits": self.study.bits(codec), "few": few}
            told["plan"] = {f"{layer}.{side}": [*its] for (layer, side), its in bits.items()}
            told["seconds"] = round(time.perf_counter() - started, 2)
            arms[name] = told
            self.write()
        self.print_row(name, arms[name])
        return arms[name]

    def print_row(self, name: str, arm: Mapping[str, Any]) -> None:
        if arm.get("few"):
            cells = [name, f"{arm['kl']:.6f}", f"{arm['nats_lost']:.4f}"]
        else:
            exact = self.exact(False)
            kept, answered, nats = kept_and_nats(arm, exact)
            bits = f"{arm['bits']:.3f}" if "bits" in arm else "16"
            cells = [name, bits, f"{arm['kl']:.5f}", str(kept), str(answered), f"{nats:.3f}"]
            for length in arm["tasks"]:
                kept, _, nats = kept_and_nats(arm, exact, length)
                cells.append(f"{kept}; {nats:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)

    def head(self, title: str, few: bool = False) -> None:
        """The head of a table."""
        print(f"\n{title}\n", flush=True)
        names = ["arm", "KL", "nats lost"]
        if not few:
            lengths = [f"{int(length):,}" for length in self.exact(False)["tasks"]]
            names = ["arm", "bits", "KL", "kept", "right", "nats", *lengths]
        print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
        if not few:
            self.print_row("exact", self.exact(False))


class Parts:
    """The tables."""

    def __init__(self, run: Run, artifacts: Sequence[Artifact]):
        self.run, self.study, self.artifacts = run, run.study, artifacts
        self.frames = frames_of(artifacts[0].rotations, run.study.model.device)
        self.places = list(elements_of(run.study.geometry))

    def plan(self, bits: Mapping[Place, int]) -> Bits:
        """The same bits in all heads of a place."""
        heads = self.study.heads
        return {place: [its] * heads[place[0]] for place, its in bits.items()}

    def everywhere(self, bits: int, sides: Iterable[str] = SIDES) -> dict[Place, int]:
        return {place: bits for place in self.places if place[1] in sides}

    def ranked(self, measure: str, sides: Sequence[str] = SIDES) -> dict[Place, float] | None:
        """What is lost at the places of these sides by part b, the worst first; None where
        not all of them are measured."""
        arms, losses = self.run.kept["arms"], {}
        for layer, side in self.places:
            if side in sides:
                if (arm := arms.get(_name_place(layer, side))) is None:
                    return None
                losses[layer, side] = arm[MEASURES[measure]]
        return dict(sorted(losses.items(), key=lambda pair: -pair[1]))

    def sides(self) -> None:
        self.run.head("a. One side, or both, in all layers")
        for sides, bits in itertools.product((("key",), ("value",), SIDES), UNIFORM):
            plan = self.plan(self.everywhere(bits, sides))
            self.run.measure(f"{_name_sides(sides)}, {bits} bits", self.frames, plan)

    def layers(self) -> None:
        self.run.head("b. One side of one layer in 2 bits, all else exact", few=True)
        # Keys first: a run that ends early has what part d needs.
        for layer, side in sorted(self.places, key=lambda place: SIDES.index(place[1])):
            name = _name_place(layer, side)
            self.run.measure(name, self.frames, self.plan({(layer, side): 2}), few=True)
        for measure, side in itertools.product(MEASURES, SIDES):
            if ranked := self.ranked(measure, [side]):
                worst = ", ".join(f"{layer} ({loss:.4f})" for (layer, _), loss in ranked.items())
                print(f"\n{side}s by {measure}: {worst}", flush=True)

    def frontier(self) -> None:
        self.run.head("e. The frontier")
        for bits in UNIFORM:
            plan = self.plan(self.everywhere(bits))
            self.run.measure(f"{_name_sides(SIDES)}, {bits} bits", self.frames, plan)
        budgets = list(self.budgets())
        for name, bits in budgets:
            self.run.measure(name, self.frames, self.plan(bits))
        for name, bits in budgets:
            print(f"\n{name}, layer by layer: {_describe(bits)}", flush=True)

    def budgets(self) -> Iterator[tuple[str, dict[Place, int]]]:
        """The names and bits of the mixed arms."""
        elements = elements_of(self.study.geometry)
        for measure, budgets in zip(MEASURES, (BUDGETS, BY_ANSWERS), strict=True):
            if losses := self.ranked(measure):
                for budget in budgets:
                    bits = share_out(losses, elements, budget)
                    yield f"{budget:g} code bits by {measure}", bits

    def few_layers(self) -> None:
        self.run.head("d. 4 bits for the keys of some layers, 2 for all else")
        for measure in MEASURES:
            if worst := self.ranked(measure, ["key"]):
                for count in (number for number in FEWER_LAYERS if number <= len(worst)):
                    finer = dict.fromkeys(list(worst)[:count], 4)
                    plan = self.plan(self.everywhere(2) | finer)
                    name = f"4 bits for keys of {count} layers by {measure}"
                    self.run.measure(name, self.frames, plan)

    def others(self) -> None:
        self.run.head("f. Other rotations, with the bits of e")
        plans = {name: bits for name, bits in self.budgets() if name.endswith("KL")}
        wanted = {name: plans[name] for name in map(_name_budget, OTHER_ROTATIONS) if name in plans}
        for name, bits in wanted.items():
            self.run.measure(name, self.frames, self.plan(bits))
        for label, make in self.rotations():
            # Made only where there is time for them.
            if self.run.is_over or not wanted:
                break
            frames = frames_of(make(), self.study.model.device)
            for name, bits in wanted.items():
                self.run.measure(f"{label}, {name}", frames, self.plan(bits))

    def rotations(self) -> Iterator[tuple[str, Callable[[], Rotations]]]:
        first = self.artifacts[0]
        if first.statistics is not None:
            for composition in ("hadamard", "random"):
                yield composition, lambda name=composition: refit(first, name)
        for artifact in self.artifacts[1:]:
            yield artifact.folder.resolve().name, lambda its=artifact: its.rotations

    def heads(self) -> None:
        self.run.head("c. One KV head alone in 2 bits", few=True)
        for side in SIDES:
            worst = list(self.ranked("KL", [side]) or {})[:WORST]
            for layer, _ in worst:
                count = self.study.heads[layer]
                for head in range(count):
                    bits = [2 if each == head else EXACT_BITS for each in range(count)]
                    name = f"{side}s of layer {layer}, head {head}"
                    self.run.measure(name, self.frames, {(layer, side): bits}, few=True)


def refit(artifact: Artifact, composition: str) -> Rotations:
    """An artifact's rotations with another composition: means, whitening and factors are made as
    its recipe says, from the same statistics."""
    assert artifact.statistics is not None
    unspent = dict.fromkeys(("bits", "key_bits", "value_bits"))
    recipe = artifact.recipe.model_copy(update={"composition": composition, **unspent})
    return fit(sums(artifact.statistics), recipe, artifact.geometry)


def _name_sides(sides: Sequence[str]) -> str:
    return "keys and values" if len(sides) > 1 else f"{sides[0]}s"


def _name_place(layer: int, side: str) -> str:
    return f"{side}s of layer {layer}"


def _name_budget(budget: float) -> str:
    return f"{budget:g} code bits by KL"


def _describe(bits: Mapping[Place, int]) -> str:
    of_sides = {side: "".join(str(bits[p]) for p in sorted(bits) if p[1] == side) for side in SIDES}
    return ", ".join(f"{side}s {digits}" for side, digits in of_sides.items())


PARTS: dict[str, Callable[[Parts], None]] = {
    "a": Parts.sides, "b": Parts.layers, "e": Parts.frontier, "d": Parts.few_layers,
    "f": Parts.others, "c": Parts.heads,
}  # fmt: skip


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "")
    parser.add_argument("model", type=Path)
    parser.add_argument("rotations", type=Path, nargs="+")
    parser.add_argument("--split", choices=SPLITS, default="dev")
    parser.add_argument("--json", type=Path, help="where to keep what is measured")
    parser.add_argument("--seconds", type=float, default=400, help="no arm is begun later")
    parser.add_argument("--parts", default="".join(PARTS), help="letters, as above")
    parser.add_argument("--questions", type=int, default=64, help="of each task and length")
    parser.add_argument(
        "--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[*LENGTHS]
    )
    parser.add_argument("--rows", type=int, default=8, help="texts for the KL")
    parser.add_argument("--few", type=int, default=16, help="questions a task of parts b and c")
    parser.add_argument("--few-rows", type=int, default=4, help="texts of parts b and c")
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--recent", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=65536 if DEVICE == "cuda" else 4096, help="a forward pass"
    )
    parser.add_argument("--tf32", action="store_true", help="products of fewer bits: faster")
    return parser


def main() -> int:
    options, begun = make_options().parse_args(), time.perf_counter()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    artifacts = [Artifact.open(folder) for folder in options.rotations]
    study = Study(options)
    run = Run(study, options, begun)
    ready = time.perf_counter() - begun
    print(f"{json.dumps(run.kept['settings'])}\n{DEVICE}, ready after {ready:.0f} s", flush=True)
    parts = Parts(run, artifacts)
    for letter in (letter for letter in PARTS if letter in options.parts):
        PARTS[letter](parts)
    print(f"\n{time.perf_counter() - begun:.0f} s{', cut short' if run.is_over else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
