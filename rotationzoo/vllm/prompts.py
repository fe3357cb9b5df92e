"""Prefill: new tokens read each other and the windows before them exact, and all else from codes.
Codes are dequantized in their own frame: queries are rotated to it, and their output back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch

from rotationzoo.codec.attention import Scores, attend_rows
from rotationzoo.codec.cuda import THREADS, Kernel, Launcher, Variant, build
from rotationzoo.codec.cuda_encoder import kernels_run_on
from rotationzoo.codec.kernels import parameters
from rotationzoo.codec.page_layout import PageLayout
from rotationzoo.codec.transform import list_scales
from rotationzoo.rotations import SIDES
from rotationzoo.vllm.pages import LayerPages, Rows
from rotationzoo.vllm.segments import SHORT, Exact, Prompts, Segment
from rotationzoo.vllm.steps import Step
from rotationzoo.vllm.streams import find_stream

_Restore = parameters.Gather | parameters.RestoreRows | parameters.RestoreSegments
BEHIND = 256  # the most tokens after the last one that may share its tile
Size = tuple[tuple[int, ...], torch.dtype]
Lend = Callable[..., list[torch.Tensor]]
"""Takes shapes and types, and returns a tensor for each, valid until the next call."""
Turns = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Matrices `[H_q, D, D]` to the frame of the codes and back, and the mean `[H_q, D]` of values."""


@dataclass(frozen=True)
class Read:
    """What queries have read from some tokens."""

    output: torch.Tensor  # [T, H_q, D]
    totals: torch.Tensor  # float32 [H_q, T]: the log-sum-exp of the logits


@dataclass(frozen=True)
class Ragged:
    """Rows of C prompts, one prompt after another."""

    rows: Sequence[torch.Tensor]
    """Queries `[T, H_q, D]`, or keys and values, `[L, H, D]` each. Unused rows may follow, of which
    the next `BEHIND` are finite."""
    bounds: torch.Tensor  # int32 [C + 1]: the first row of each prompt, and the end
    longest: int  # rows of the longest prompt


class TorchAttention:
    """Attention of C prompts, defined in plain torch: one prompt at a time, waiting for the GPU."""

    segment = SHORT  # tokens that are read at a time
    queries = 512  # queries whose attention weights are computed at a time

    def attend(
        self, queries: Ragged, read: Ragged, scores: Scores, causal: bool, output: torch.Tensor
    ) -> Read:
        """Let the queries of each prompt attend to its keys and values, and write to `output`
        `[T, H_q, D]`. A query without keys gets zeros and minus infinity. `causal`: the queries
        belong to the last keys, and each reads the keys up to its own."""
        totals = output.new_empty(output.shape[1::-1], dtype=torch.float32)
        limits = (pairwise(each.bounds.tolist()) for each in (queries, read))
        for (begin, end), (first, last) in zip(*limits, strict=True):
            keys, values = (rows[first:last].transpose(0, 1)[None] for rows in read.rows)
            position = torch.arange(last - first, device=output.device)
            before = last - first - (end - begin) if causal else last - first
            for at in range(begin, end, self.queries):
                part = slice(at, min(at + self.queries, end))
                own = torch.arange(part.start - begin, part.stop - begin, device=output.device)
                mask = position <= before + own[:, None]
                query = queries.rows[0][part].transpose(0, 1)[None]
                result, total = attend_rows(query, keys, values, mask[None], scores)
                output[part], totals[:, part] = result[0].transpose(0, 1), total[0]
        return Read(output, totals)

    def merge(self, first: Read, second: Read, output: torch.Tensor) -> Read:
        """Combine what the queries read from both, in `output`."""
        totals = torch.logaddexp(first.totals, second.totals)
        output.zero_()
        for part in (first, second):
            weights = (part.totals - totals).exp().nan_to_num(0).T[..., None]  # 0 if none read
            output.add_(part.output * weights)
        return Read(output, totals)


def scratch_sizes(
    queries: Sequence[int], rows: Sequence[int], dtype: torch.dtype, value_dim: int | None = None
) -> list[Size]:
    """The scratch memory of queries `[T, H_q, D]`: their exact output, the rotated queries, three
    partial outputs, all of which but the second have `value_dim` channels or D, and `rows`
    `[room, H, D]` of keys and of values."""
    *some, dim = queries
    outputs = *some, value_dim or dim
    shapes = outputs, queries, outputs, outputs, outputs, rows, rows
    return [(tuple(each), dtype) for each in shapes]


class LayerReader:
    """Stores the new tokens of a step in one layer's pages, and computes what they read."""

    def __init__(
        self, pages: LayerPages, attention: TorchAttention | None = None, lend: Lend | None = None
    ):
        """By default, prompts attend in plain torch and in new memory."""
        device = pages.memory["key"].device
        self.pages, self.attention = pages, attention or TorchAttention()
        self.lend, self.stream = lend or partial(_allocate, device), find_stream(device)
        self._turns: Turns | None = None
        self.copies = pages.copies
        self._key_mean: torch.Tensor | None = pages.codec.rotations[pages.layer].key.mean

    @torch.no_grad()
    def run(
        self, step: Step, query: torch.Tensor, rows: Rows, scores: Scores, output: torch.Tensor
    ) -> None:
        """Store new keys and values `rows` `[T, H, D]`, and attend with their queries
        `[T, H_q, D]`, in the order that `StoreStream` requires. Few new tokens of a request read as
        in `LayerPages.attend`; many read the sink, the recent window and themselves exact."""
        rows, decodes = self.store(step, rows), len(query)
        if step.prompts is not None:
            decodes = step.prompts.token
            self.read_prompts(step, query[decodes:], rows, scores, output[decodes:])
        self.read_decodes(step, query[:decodes], scores, output[:decodes])

    def store(self, step: Step, rows: Rows) -> Rows:
        """Copy new rows, begin to store them, and return them as they are copied."""
        pages = self.pages
        # Kernels read the rows of a token without gaps.
        rows = {side: each.to(pages.copies[side].dtype) for side, each in rows.items()}
        for side, each in rows.items():
            if each.stride()[1:] != (each.shape[-1], 1):
                rows[side] = each.contiguous()
        overlaps = step.decode.copied
        if step.prompts is not None:
            overlaps = not pages.has_few(rows)
        self.stream.start(overlaps, pages.store, step, rows)
        pages.copy(step, rows)
        return rows

    def read_decodes(
        self, step: Step, query: torch.Tensor, scores: Scores, output: torch.Tensor
    ) -> None:
        """Attend with the queries before those of prompts, and end the layer."""
        if not step.decode.copied:
            self.stream.wait()
        if len(query):
            self.pages.attend(step, query, scores, output)
        self.stream.wait()

    def read_prompts(
        self, step: Step, query: torch.Tensor, rows: Rows, scores: Scores, output: torch.Tensor
    ) -> None:
        """Let prompts read what is exact, then codes. `rows`: of all new tokens, as `store` returns
        them. Everything is stored afterwards."""
        prompts = step.prompts
        assert prompts is not None
        rows = {side: each[prompts.token :] for side, each in rows.items()}
        if not prompts.exact:  # one prompt without context
            new = prompts.bounds, prompts.longest
            read = Ragged(self._new_rows(rows), *new)
            self.attention.attend(Ragged((query,), *new), read, scores, True, output)
            self.stream.wait()
            return
        room = max(self.attention.segment, *(group.read.max_tokens for group in prompts.exact))
        shape = room, *rows["key"].shape[1:]
        sizes = scratch_sizes(query.shape, shape, query.dtype, output.shape[-1])
        scratch, totals = self.lend(*sizes), []
        exact, into = scratch[0] if prompts.codes else output, scratch[-2:]
        for group in prompts.exact:
            read = Ragged(
                self._gather(step, group, rows, into), group.read.bounds, group.read.longest
            )
            queries, results = (each[group.tokens] for each in (query, exact))
            own = Ragged((queries,), group.bounds, group.longest)
            totals.append(self.attention.attend(own, read, scores, True, results).totals)
            del read  # so that the next rows find its memory
        if prompts.codes:
            if step.meets:
                self.stream.wait()
            # Attention sinks count once.
            codes = self._read_codes(prompts, query, Scores(scores.scale, scores.soft_cap), scratch)
            total = totals[0] if len(totals) == 1 else torch.cat(totals, 1)
            self.attention.merge(Read(exact, total), codes, output)
        self.stream.wait()

    def _read_codes(
        self, prompts: Prompts, query: torch.Tensor, scores: Scores, scratch: list[torch.Tensor]
    ) -> Read:
        """Let prompts read from codes, in segments."""
        _, turned, into, second, spare, *rows = scratch
        queries = Ragged((self._turn(query, turned),), prompts.bounds, prompts.longest)
        codes = None
        for segment in prompts.codes:
            restored = self._restore(prompts.page_table, segment, rows)
            read = Ragged(restored, segment.bounds, segment.longest)
            part = self.attention.attend(queries, read, scores, False, into)
            del restored, read
            if codes is not None:
                part, spare = self.attention.merge(codes, part, spare), codes.output
            codes, into = part, second
        assert codes is not None
        return Read(self._turn_back(codes.output, second), codes.totals)

    def _new_rows(self, rows: Rows) -> Sequence[torch.Tensor]:
        """The keys and values that new tokens read of each other."""
        return self._exact_keys(rows["key"]), rows["value"]

    def _exact_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys `[T, H, D]` without their mean, where they are centered."""
        if self._key_mean is None:
            return rows
        pages, by_head = self.pages, rows.transpose(0, 1)
        return pages.codec.keep_exact(by_head, pages.layer, "key").transpose(0, 1)

    def _turn(self, query: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Queries in the frame of the codes."""
        self._turns = self._turns or self._make_turns(query)
        return _multiply(query, self._turns[0], into)

    def _turn_back(self, output: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """What queries read from codes, in the model's frame."""
        assert self._turns is not None
        _, matrix, mean = self._turns
        restored = _multiply(output, matrix, into)
        return restored if mean is None else restored.add_(mean)

    def _make_turns(self, like: torch.Tensor) -> Turns:
        pages, group = self.pages, like.shape[1] // self.pages.heads
        key, value = (pages.codec.inverse(pages.layer, side) for side in SIDES)
        mean = pages.codec.rotations[pages.layer]["value"].mean
        # With key = stored @ matrix, query . key = (query @ matrix.T) . stored.
        query, output = (each.to(like).repeat_interleave(group, 0) for each in (key.mT, value))
        if mean is not None:
            mean = mean.to(like).repeat_interleave(group, 0)
        return query, output, mean

    def _gather(
        self, step: Step, exact: Exact, rows: Rows, into: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The keys and values that a group of prompts reads exact, in `into`, `[room, H, D]` each:
        copies, then new `rows` `[T, H, D]`; keys without their mean."""
        table, contexts = exact.page_table, exact.contexts
        new = {side: rows[side][exact.tokens] for side in SIDES}
        if kernels_run_on(into[0].device):
            mean, sides = self._key_mean, zip(SIDES, into, strict=True)
            key, value = (
                parameters.GatheredRows(self.copies[side], new[side], new[side].stride(0), target)
                for side, target in sides
            )
            arguments = parameters.Gather(
                tokens=_tokens(exact.read, table),
                room=len(into[0]),
                slot_of=step.slot_of,
                contexts=contexts,
                news=exact.bounds,
                mean=None if mean is None else mean.float(),
                key=key,
                value=value,
            )
            dim = into[0].shape[-1]
            self._launch("gather", exact.read, arguments, Variant(dim, dim, into[0].dtype))
            return into
        prompt, position = exact.read.positions
        pages, at = self._places(table, prompt, position)
        later = position - contexts[prompt]
        for side, target in zip(SIDES, into, strict=True):
            number = (exact.bounds[prompt] + later).clamp(min=0, max=len(new[side]) - 1)
            copies = self.copies[side][step.slot_of[pages], :, at]
            gathered = torch.where((later >= 0)[:, None, None], new[side][number], copies)
            target[: len(gathered)] = self._exact_keys(gathered) if side == "key" else gathered
        return into

    def _restore(
        self, table: torch.Tensor, segment: Segment, into: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The dequantized rows of each side of a segment, in `into`, `[room, H, D]` each."""
        pages, layout = self.pages, self.pages.layouts["value"]
        given = _tokens(segment, table), len(into[0]), pages.page_bytes
        sides = [*zip(SIDES, into, strict=True)]
        if pages.has_segments:
            found = [(pages.segments[side], to) for side, to in sides]
            both = [parameters.RestoredSegments(each.places, each.memory, to) for each, to in found]
            restored = parameters.RestoreSegments(*given, list_scales(table.device), *both)
            variant = Variant(layout.dim, layout.dim, into[0].dtype)
            self._launch("restore_segments", segment, restored, variant, "segments.cu")
        elif isinstance(layout, PageLayout) and kernels_run_on(into[0].device):
            rows = [parameters.RestoredRows(pages.memory[side], to) for side, to in sides]
            begin, group = parameters.Begin(*layout.starts[1:3]), layout.dim // layout.groups
            variant = Variant(layout.dim, group, into[0].dtype, layout.format)
            arguments = parameters.RestoreRows(*given, begin, *rows)
            self._launch("restore_rows", segment, arguments, variant)
        else:
            places = self._places(table, *segment.positions)
            for side, target in sides:
                stored = pages.dequantize(side, *places)
                target[: len(stored)] = stored
        return into

    def _places(
        self, table: torch.Tensor, prompt: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages of tokens, and their offsets there."""
        tokens = self.pages.tokens
        number = (position // tokens).clamp(max=table.shape[1] - 1)  # any page for new tokens
        return table[prompt, number], position % tokens

    def _launch(
        self,
        name: str,
        of: Segment,
        arguments: _Restore,
        variant: Variant,
        source: str = "restore.cu",
    ) -> None:
        """Launch a kernel of `restore.cu` or `segments.cu` for both sides of a segment."""
        device, pages = of.bounds.device, self.pages
        kernel = _restore_kernel(name, source, variant, pages.tokens, pages.rope_dim, device)
        rows = min(of.max_tokens + BEHIND, arguments.room)
        grid = -(-rows // kernel.block_rows), pages.heads, 2
        Launcher(device)(kernel.function, grid, THREADS, arguments, early=False)


@cache
def _restore_kernel(
    name: str, source: str, variant: Variant, tokens: int, exact: int, device: torch.device
) -> Kernel:
    """A kernel for pages of `tokens` tokens, which have `exact` channels beside latents."""
    macros = (*variant.macros(), ("TOKENS", str(tokens)), ("EXACT", str(exact)))
    code = build(source, macros, device)
    return Kernel(code.get_kernel(name), variant.block_rows)


def _tokens(of: Segment, table: torch.Tensor) -> parameters.Tokens:
    """A kernel's argument for tokens of prompts whose pages are in this table."""
    starts = of.bounds, of.firsts, of.jumps, of.gaps
    return parameters.Tokens(*starts, prompts=len(of.firsts), table=table, stride=table.stride(0))


def _allocate(device: torch.device, *sizes: Size) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]


def _multiply(rows: torch.Tensor, matrices: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Rows `[T, H, D]` times the matrices of their heads `[H, D, D]`, without a copy of either."""
    torch.bmm(rows.transpose(0, 1), matrices, out=output.transpose(0, 1))
    return output
