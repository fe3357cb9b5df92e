"""One step of a server, planned once for all its layers: where new tokens are stored, which pages
have exact copies, and what the queries of each request read.

All of it is computed on the device of the block table, and nothing waits for that device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rotationzoo.codec.cuda import Launcher, build
from rotationzoo.codec.cuda_encoder import kernels_run_on
from rotationzoo.codec.kernels.parameters import Plan
from rotationzoo.codec.windows import CacheLayout
from rotationzoo.vllm import segments
from rotationzoo.vllm.segments import HostMetadata, Prompts, Reads, find_reads, plan_prompts

_THREADS = 1024  # of its block
_KEPT = 64  # steps of few tokens, of other sizes each, whose tensors are kept
_NEVER = 2**62  # when slot 0 is used next: it takes copies that are never read


@dataclass(frozen=True)
class CopiedTokens:
    """Tokens of B requests that are read exact, in N slots of the copies each: int32."""

    slots: torch.Tensor  # [B, N]
    starts: torch.Tensor | None  # [B]: the first of these tokens that is read; None: 0
    lengths: torch.Tensor  # [B]: the token after the last one that is read


@dataclass(frozen=True)
class DecodeMetadata:
    """What the few new tokens of B requests read, as if each were a step of its own."""

    new: int  # the last `new` tokens of each request are queries
    copied: bool  # whether all new tokens are read from copies alone, by other requests too
    spread: tuple[torch.Tensor, torch.Tensor] | None
    """int64: the row of each of the `new` queries of each request (any row if it has fewer), and
    the query of each row. None: these are the same."""
    page_table: torch.Tensor  # int64 [B, N]
    starts: torch.Tensor  # int32 [B]: the first token that is read from codes
    floors: torch.Tensor  # int32 [B]: the token after the last one that the first query so reads
    ends: torch.Tensor  # int32 [B]: the token after the last one that the last query so reads
    sink: CopiedTokens
    recent: CopiedTokens


@dataclass(frozen=True)
class Step:
    """What the layers of one step share."""

    pages: torch.Tensor  # int64 [T]: the page of each new token; page 0 belongs to no request
    page_offsets: torch.Tensor  # int64 [T]: its offset in the page, in tokens
    slots: torch.Tensor  # int64 [T]: the slot of its page's copies; slot 0 belongs to no page
    decode: DecodeMetadata  # of the requests with few new tokens, which come first
    max_pages: int  # of one request
    prompts: Prompts | None  # the other requests
    slot_of: torch.Tensor  # int64 [pages]: the slot of each page's copies, or 0, in this step
    meets: bool  # whether a request may read tokens that another one stores in this step


class Planner:
    """Plans steps, and tracks which pages have exact copies, which requests with a common prefix
    share. When a token is stored in a page without a slot that this step's windows touch, the page
    gets the least recently read slot: that token and later ones are copied. A page whose first
    token is stored again has lost its former tokens."""

    def __init__(  # noqa: PLR0913 (what a server and its device have)
        self,
        layout: CacheLayout,
        tokens: int,
        pages: int,
        most_requests: int,
        device: torch.device,
        segment: int = segments.SHORT,
        verified: int = 1,
    ):
        """For `pages` pages of `tokens` tokens on a device. Page 0 belongs to no request. Prompts
        read `segment` earlier tokens at a time; other requests have `verified` new tokens."""
        self.layout, self.tokens = layout, tokens
        self.sink, self.recent = layout.sink, layout.recent  # at least 1: a token reads itself
        self.sink_pages, self.recent_pages = _window_pages(layout, tokens, 1)
        self.slots = count_slots(layout, tokens, most_requests, verified)
        self.slot_of = torch.zeros(pages, dtype=torch.int64, device=device)
        self._page_of, self._copied_from, self._used = (
            torch.zeros(self.slots, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._used[0] = _NEVER
        self._forgotten = torch.zeros(1, dtype=torch.int64, device=device)
        self._now = 0
        self._most_rows = max(segments.DECODE_THRESHOLD, verified) * most_requests
        self._segment = segment
        self._verified = verified
        self._last: tuple[DecodeMetadata, torch.Tensor, torch.Tensor] | None = None
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._steps: dict[tuple[int, ...], tuple[torch.Tensor, Step]] = {}

    def plan(
        self,
        table: torch.Tensor,
        lengths: torch.Tensor,
        counts: torch.Tensor,
        mapping: torch.Tensor,
        host: HostMetadata,
    ) -> Step:
        """Plan the step of B requests with T new tokens. On the device, `table` int32 `[B, N]` has
        their pages and `lengths` int32 `[B]` their tokens, of which the last `counts` `[B]` are
        new. `mapping` int64 `[T]` says where each new token is stored: page times tokens of a page
        plus offset, or -1 for padding. Steps of few tokens reuse the same addresses, for graphs."""
        self._now += 1
        rows, has_prompts = host.decodes, host.has_prompts
        sizes = *table.shape, len(mapping), rows, host.max_new
        # Graphs replay only few tokens. The tokens of a prompt must not move their buffers.
        made = self._make_step(self._new, sizes) if has_prompts else self._reuse_step(sizes)
        page_table, step = made
        page_table.copy_(table)
        # The batch of a graph has padding, which belongs to no request.
        spread = host.spread(host.decode_tokens if has_prompts else len(mapping), table.device)
        decode = step.decode if spread is None else replace(step.decode, spread=spread)
        max_pages = -(-host.max_tokens // self.tokens)
        step = replace(step, decode=decode, max_pages=max_pages, meets=host.meets)
        self._last = decode, lengths, counts
        many, reads = host.count_segments(self._segment) if has_prompts else 0, None
        if kernels_run_on(table.device):
            if has_prompts:
                reads = Reads.allocate(len(table) - rows, many, table.device)
            numbers = table.int(), lengths.int(), counts.int(), mapping.long()
            self._plan_in_kernel(step, reads, *numbers)
        else:
            numbers = table.long(), lengths.long(), counts.long(), mapping.long()
            reads = self._plan_in_torch(step, many, *numbers)
        if reads is None or not has_prompts:
            return step
        windows = self.sink + self.recent
        prompts = plan_prompts(host, reads, page_table, windows, self._segment)
        return replace(step, prompts=prompts)

    def forget(self, pages: torch.Tensor) -> None:
        """Drop the copies of these pages. Page 0 never has any."""
        self._used[self.slot_of[pages]] = 0
        self._used[0] = _NEVER
        self.slot_of[pages] = 0

    @property
    def has_planned(self) -> bool:
        return self._last is not None

    def count(self) -> torch.Tensor:
        """The first four of `metrics.COUNTED` after a step, int64 `[4]`, on the device."""
        assert self._last is not None
        decode, lengths, counts = self._last
        contexts = (lengths - counts)[: len(decode.starts)]
        sinks = decode.starts < contexts.clamp(max=self.sink)
        # The window of the first new token begins first.
        recents = decode.floors > decode.starts.maximum(contexts + 1 - self.recent)
        used, forgotten = self.slot_of.count_nonzero(), self._forgotten[0]
        return torch.stack([used, forgotten, sinks.sum(), recents.sum()])

    def _reuse_step(self, sizes: tuple[int, ...]) -> tuple[torch.Tensor, Step]:
        """As `_make_step`, with tensors that keep their addresses."""
        if sizes not in self._steps:
            if len(self._steps) == _KEPT:
                self._steps.clear()
            self._steps[sizes] = self._make_step(self._buffer, sizes)
        return self._steps[sizes]

    def _make_step(
        self, like: Callable[..., torch.Tensor], sizes: tuple[int, ...]
    ) -> tuple[torch.Tensor, Step]:
        """The page table int64 `[B, N]` of a step, and the step, for the caller to fill. `like`
        makes a tensor. `sizes`: B, N, new tokens, and how many of the requests have few of them,
        and how many each at most."""
        requests, width, tokens, rows, new = sizes
        page_table = like("page_table", requests, width, dtype=torch.int64)
        pages, page_offsets, slots = (
            like(name, tokens, dtype=torch.int64) for name in ("pages", "page_offsets", "slots")
        )
        names = "starts", "floors", "ends", "sink lengths", "recent starts", "recent lengths"
        starts, floors, ends, sink_lengths, *recents = (like(name, rows) for name in names)
        recent_pages = _window_pages(self.layout, self.tokens, new)[1]
        sink = CopiedTokens(like("sink slots", rows, self.sink_pages), None, sink_lengths)
        recent = CopiedTokens(like("recent slots", rows, recent_pages), *recents)
        # A request may begin right after the new tokens of another. Its last query reads both
        # exact where `recent` holds twice as many.
        copied = new <= min(self._verified, self.recent // 2)
        bounds = page_table[:rows], starts, floors, ends
        decode = DecodeMetadata(new, copied, None, *bounds, sink, recent)
        step = Step(pages, page_offsets, slots, decode, 0, None, self.slot_of, meets=True)
        return page_table, step

    def _new(self, _: str, rows: int, *size: int, dtype: Any = torch.int32) -> torch.Tensor:
        return torch.empty(rows, *size, dtype=dtype, device=self.slot_of.device)

    def _buffer(self, name: str, rows: int, *size: int, dtype: Any = torch.int32) -> torch.Tensor:
        """A tensor `[rows, ...]` that keeps its address."""
        place = name, size
        if place not in self._buffers or len(self._buffers[place]) < rows:
            room = max(rows, self._most_rows)
            self._steps.clear()  # which may have the former tensor
            self._buffers[place] = self._new(name, room, *size, dtype=dtype)
        return self._buffers[place][:rows]

    def _plan_in_kernel(self, step: Step, reads: Reads | None, *numbers: torch.Tensor) -> None:
        """Compute what `_plan_in_torch` does, in one launch, and fill `reads`."""
        decode, recent = step.decode, step.decode.recent
        table, lengths, counts, mapping = (each.contiguous() for each in numbers)
        assert recent.starts is not None
        of_prompts, segments = {}, 0  # without prompts, the kernel gets null pointers
        if reads is not None:
            of_prompts, segments = vars(reads), len(reads.code_firsts)
        arguments = Plan(
            table=table,
            width=table.shape[1],
            lengths=lengths,
            counts=counts,
            batch=len(lengths),
            mapping=mapping,
            tokens=len(mapping),
            decodes=len(decode.starts),
            few=decode.new,
            recent_pages=recent.slots.shape[1],
            slot_of=self.slot_of,
            page_of=self._page_of,
            copied_from=self._copied_from,
            used=self._used,
            forgotten=self._forgotten,
            slots=self.slots,
            now=self._now,
            pages=step.pages,
            places=step.page_offsets,
            new_slots=step.slots,
            starts=decode.starts,
            floors=decode.floors,
            ends=decode.ends,
            sink_slots=decode.sink.slots,
            sink_lengths=decode.sink.lengths,
            recent_slots=recent.slots,
            recent_starts=recent.starts,
            recent_lengths=recent.lengths,
            segments=segments,
            most=self._segment,
            **of_prompts,
        )
        Launcher(table.device)(self._kernel, (1, 1, 1), _THREADS, arguments, early=False)

    @cached_property
    def _kernel(self) -> Any:
        macros = {
            "TOKENS": self.tokens,
            "SINK": self.sink,
            "RECENT": self.recent,
            "SINK_PAGES": self.sink_pages,
            "RECENT_PAGES": self.recent_pages,
        }
        named = tuple((name, str(number)) for name, number in macros.items())
        return build("server_step.cu", named, self.slot_of.device).get_kernel("plan")

    def _plan_in_torch(self, step: Step, many: int, *numbers: torch.Tensor) -> Reads:
        """Write the plan, and return what the prompts read, in `many` segments."""
        table, lengths, counts, mapping = numbers
        contexts, stored = lengths - counts, mapping.clamp(min=0)
        decode, (rows, pages) = step.decode, step.decode.recent.slots.shape
        step.pages.copy_(stored // self.tokens)
        step.page_offsets.copy_(stored % self.tokens)
        self.forget(torch.where(step.page_offsets == 0, step.pages, 0))
        # Where few tokens are new, the first one's window begins first.
        firsts = torch.where(counts > decode.new, lengths, contexts + 1)
        self._copy_windows(table, contexts, firsts, lengths, pages)
        step.slots.copy_(self.slot_of[step.pages])
        sink, sink_slots = self._find_sink(table, contexts, lengths)
        floors, recent_slots, skipped = self._find_recent(table, firsts, lengths, sink, pages)
        # New tokens of the sink are also read exact, and so are the few after them.
        ends = torch.where(
            contexts < self.sink, floors, torch.maximum(floors, lengths - self.recent)
        )
        targets: list[torch.Tensor | None] = [decode.starts, decode.floors, decode.ends]
        targets += [decode.sink.slots, decode.sink.lengths]
        targets += [decode.recent.slots, decode.recent.starts, decode.recent.lengths]
        sources = [sink, floors, ends, sink_slots, sink]
        sources += [recent_slots, ends - skipped, lengths - skipped]
        for target, source in zip(targets, sources, strict=True):
            assert target is not None
            target.copy_(source[:rows])
        recents = self._find_recent(table, contexts, contexts, sink, self.recent_pages)[0]
        held, starts, ends, new = (e[rows:].int() for e in (contexts, sink, recents, counts))
        return find_reads(held, starts, ends, new, many, self._segment)

    def _copy_windows(
        self,
        table: torch.Tensor,
        starts: torch.Tensor,
        firsts: torch.Tensor,
        lengths: torch.Tensor,
        recent_pages: int,
    ) -> None:
        """Keep the copies in the windows of these requests. Give a slot to the pages of the sink
        and of the window at `firsts` that have none and get new tokens, from `starts` on. Three
        masks name the pages, for few new tokens and for many:

            |  sink   | codes |  recent   |        new        |
            | in_sink |       |           in_recent           |
            | in_sink |       | in_before |       | in_recent |
        """
        first = self._first_page(firsts)
        sink, in_sink = self._number(torch.zeros_like(first), lengths, self.sink_pages)
        recent, in_recent = self._number(first, lengths, recent_pages)
        before, in_before = self._number(self._first_page(starts), lengths, recent_pages)
        in_recent &= recent >= self.sink_pages  # a page of both would get two slots
        # The windows of few tokens end with themselves, and cover what is before them.
        in_before &= (firsts > starts + 1)[:, None]
        number = torch.cat([sink, recent, before], 1)
        pages = self._pages(table, number, torch.cat([in_sink, in_recent, in_before], 1))
        self._used[self.slot_of[pages]] = self._now
        self._used[0] = _NEVER
        pages = pages[:, :-recent_pages].flatten()
        copied_from = (starts[:, None] - number[:, :-recent_pages] * self.tokens).flatten()
        begins = (copied_from < self.tokens) & (pages > 0) & (self.slot_of[pages] == 0)
        # The n-th page that needs a slot gets the n-th least recently used one.
        order = self._used.argsort(stable=True)
        slots = order[(begins.cumsum(0) - 1).clamp(min=0, max=self.slots - 1)]
        given = begins & (self._used[slots] < self._now)
        slots, pages = torch.where(given, slots, 0), torch.where(given, pages, 0)
        former = self._page_of[slots]
        former = torch.where(self.slot_of[former] == slots, former, 0)
        self._forgotten += (former > 0).sum()
        self.slot_of[former] = 0
        self.slot_of[pages], self._page_of[slots], self._used[slots] = slots, pages, self._now
        self._copied_from[slots] = copied_from.clamp(min=0)
        self.slot_of[0], self._used[0] = 0, _NEVER

    def _first_page(self, ends: torch.Tensor) -> torch.Tensor:
        """The first page `[B]` of the recent windows that end with these tokens `[B]`."""
        return (ends - self.recent).clamp(min=0) // self.tokens

    def _number(
        self, first: torch.Tensor, lengths: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Page numbers `[B, count]` from `first` `[B]` on, and which of them have tokens."""
        number = first[:, None] + torch.arange(count, device=first.device)
        return number, number * self.tokens < lengths[:, None]

    def _pages(
        self, table: torch.Tensor, number: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """The pages with these numbers `[B, W]` in their request, or 0 where `counts` is false."""
        return torch.where(counts, table.gather(1, number.clamp(max=table.shape[1] - 1)), 0)

    def _find_sink(
        self, table: torch.Tensor, contexts: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many tokens of the sink before the new ones are read exact `[B]`, all or none, and
        the slots of their copies `[B, pages of the sink]`."""
        number, counts = self._number(torch.zeros_like(lengths), lengths, self.sink_pages)
        slots = self.slot_of[self._pages(table, number, counts)]
        whole = ((slots > 0) & (self._copied_from[slots] == 0) | ~counts).all(1)
        return torch.where(whole, contexts.clamp(min=0, max=self.sink), 0), slots

    def _find_recent(
        self,
        table: torch.Tensor,
        firsts: torch.Tensor,
        lengths: torch.Tensor,
        sink: torch.Tensor,
        pages: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first token `[B]` of the window at `firsts` `[B]` from which all up to `lengths`
        `[B]` have copies; their slots `[B, pages]`; and the tokens before the first slot `[B]`."""
        first = self._first_page(firsts)
        number, counts = self._number(first, lengths, pages)
        slots = self.slot_of[self._pages(table, number, counts)]
        # The last page that lacks some copies.
        missing = torch.where(slots > 0, self._copied_from[slots], self.tokens) * counts
        missing = torch.where(missing > 0, number * self.tokens + missing, 0).amax(1)
        begin = torch.maximum(firsts - self.recent, missing)
        begin = torch.minimum(torch.maximum(begin, sink), lengths)
        return begin, slots, first * self.tokens


def count_slots(layout: CacheLayout, tokens: int, most_requests: int, verified: int = 1) -> int:
    """The slots for exact copies of pages of `tokens` tokens: for every page that the windows of
    all requests with `verified` new tokens touch, for the chunk of a prompt, and slot 0."""
    sink, recent = _window_pages(layout, tokens, verified)
    return (sink + recent) * most_requests + recent + 1


def _window_pages(layout: CacheLayout, tokens: int, new: int) -> tuple[int, int]:
    """The most pages that the sink and the recent windows of `new` tokens of a request touch."""
    # The recent window may begin and end inside a page.
    return -(-layout.sink // tokens), -(-(layout.recent + new - 2) // tokens) + 1
