"""One step of a server, planned once for all its layers: where new tokens are stored, which pages
have exact copies, and what the queries of each request read.

All of it is computed on the device of the block table, and nothing waits for that device.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from rotationzoo.codec.cuda import Launcher, build
from rotationzoo.codec.cuda_encoder import kernels_run_on
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.vllm import segments
from rotationzoo.vllm.segments import Prompts

_SOURCE = Path(__file__).with_name("plan.cu")
_THREADS = 1024  # of its block
_NEVER = 2**62
"""When slot 0 is used next: it takes copies that are never read."""


@dataclass(frozen=True)
class CopiedTokens:
    """Tokens of B requests that are read exact, in N slots of the copies each."""

    slots: torch.Tensor
    """int32 `[B, N]`."""
    starts: torch.Tensor | None
    """int32 `[B]`: the first of these tokens that is read; None: 0."""
    lengths: torch.Tensor
    """int32 `[B]`: the token after the last one that is read."""

    def first(self, rows: int) -> "CopiedTokens":
        """Those of the first requests."""
        starts = None if self.starts is None else self.starts[:rows]
        return CopiedTokens(self.slots[:rows], starts, self.lengths[:rows])


@dataclass(frozen=True)
class DecodeMetadata:
    """What the single new tokens of B requests read."""

    page_table: torch.Tensor
    """int64 `[B, N]`: where their pages begin, in bytes after page 0."""
    starts: torch.Tensor
    """int32 `[B]`: the first token that is read from its codes."""
    ends: torch.Tensor
    """int32 `[B]`: the token after the last one that is read from its codes."""
    sink: CopiedTokens
    recent: CopiedTokens

    def first(self, rows: int) -> "DecodeMetadata":
        """That of the first requests."""
        return DecodeMetadata(
            self.page_table[:rows],
            self.starts[:rows],
            self.ends[:rows],
            self.sink.first(rows),
            self.recent.first(rows),
        )


@dataclass(frozen=True)
class Step:
    """What the layers of one step share."""

    pages: torch.Tensor
    """int64 `[T]`: the page of each new token. Page 0 belongs to no request."""
    page_offsets: torch.Tensor
    """int64 `[T]`: its offset in the page, in tokens."""
    slots: torch.Tensor
    """int64 `[T]`: the slot of the copies of its page. Slot 0 belongs to no page."""
    decode: DecodeMetadata
    """Of the requests with one new token, which come first."""
    room: int
    """No request has more pages."""
    prompts: Prompts | None
    """The other requests."""
    slot_of: torch.Tensor
    """int64 `[pages]`: the slot of the copies of each page; 0 where there are none. It holds until
    the next step is planned."""


@dataclass(frozen=True)
class Known:
    """What is known of a step without waiting for a device: int64 tensors on the CPU."""

    counts: torch.Tensor
    """`[B]`: new tokens of each request. Requests with one come before those with several."""
    lengths: torch.Tensor
    """`[B]`: tokens of each request, right where several are new."""
    most_tokens: int
    """No request has more tokens."""

    @cached_property
    def singles(self) -> int:
        """How many requests come before the first with several new tokens."""
        several = (self.counts > 1).nonzero()
        return int(several[0]) if len(several) else len(self.counts)

    @property
    def has_prompts(self) -> bool:
        """Whether any request has several new tokens."""
        return self.singles < len(self.counts)


class Planner:
    """Plans steps, and knows which pages have exact copies.

    Copies belong to a page, so that a request that begins with the prefix of another finds them. A
    page gets a slot when the first of its tokens is stored, if this step's windows touch it; then
    all its tokens are copied. The slot that was read least recently is taken. A page whose first
    token is stored again has forgotten its former tokens.
    """

    def __init__(  # noqa: PLR0913 (what a server and its device have)
        self,
        layout: CacheLayout,
        tokens: int,
        page_bytes: int,
        pages: int,
        most_requests: int,
        device: torch.device,
        segment: int = segments.FEW,
    ):
        """For pages of so many tokens and bytes on this device. Page 0 belongs to no request.
        Prompts read `segment` earlier tokens at a time."""
        self.tokens, self.page_bytes, self.sink = tokens, page_bytes, layout.sink
        self.recent = layout.recent  # at least 1: a token reads itself exact
        self.sink_pages, self.recent_pages = _window_pages(layout, tokens)
        self.slots = count_slots(layout, tokens, most_requests)
        self.slot_of = torch.zeros(pages, dtype=torch.int64, device=device)
        self._page_of = torch.zeros(self.slots, dtype=torch.int64, device=device)
        self._used = torch.zeros(self.slots, dtype=torch.int64, device=device)
        self._used[0] = _NEVER
        self._now = 0
        self._most_requests, self._segment = most_requests, segment
        self._buffers: dict[str, torch.Tensor] = {}

    def plan(
        self,
        table: torch.Tensor,
        lengths: torch.Tensor,
        counts: torch.Tensor,
        mapping: torch.Tensor,
        known: Known,
    ) -> Step:
        """Plan the step of B requests with T new tokens. Of the tensors on the device, `table`
        int32 `[B, N]` has the numbers of their pages, `lengths` int32 `[B]` their tokens, of which
        the last `counts` `[B]` are new, and `mapping` int64 `[T]` says where each new token is
        stored: page times tokens of a page plus offset, or -1 for padding.

        All that a step of single tokens has stays at the same addresses from step to step, for
        graphs that replay.
        """
        self._now += 1
        rows, device = len(lengths), table.device
        # Graphs replay single tokens alone. The tokens of a prompt must not move their buffers.
        make = _new if known.has_prompts else self._buffer
        like = partial(make, device=device)
        page_table = like("page_table", rows, table.shape[1], dtype=torch.int64)
        page_table.copy_(table).mul_(self.page_bytes)  # in 64 bits: a layer may have gigabytes
        pages, page_offsets, slots = (
            like(name, len(mapping), dtype=torch.int64)
            for name in ("pages", "page_offsets", "slots")
        )
        starts, ends = like("starts", rows), like("ends", rows)
        sink = CopiedTokens(
            like("sink slots", rows, self.sink_pages), None, like("sink lengths", rows)
        )
        recent = CopiedTokens(
            like("recent slots", rows, self.recent_pages),
            like("recent starts", rows),
            like("recent lengths", rows),
        )
        decode = DecodeMetadata(page_table, starts, ends, sink, recent)
        step = Step(
            pages,
            page_offsets,
            slots,
            decode,
            -(-known.most_tokens // self.tokens),
            None,
            self.slot_of,
        )
        if not known.has_prompts and kernels_run_on(device):
            self._plan_in_kernel(step, table, lengths, mapping)
            return step
        numbers = table.long(), lengths.long(), counts.long(), mapping.long()
        self._plan_in_torch(step, *numbers)
        if not known.has_prompts:
            return step
        prompts = self._plan_prompts(known, page_table, starts, *numbers[:3])
        return replace(step, decode=decode.first(known.singles), prompts=prompts)

    def _plan_prompts(
        self,
        known: Known,
        page_table: torch.Tensor,
        sink: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        counts: torch.Tensor,
    ) -> Prompts:
        """What requests with several new tokens read beside them; `sink` int32 `[B]` says how many
        of their first tokens are read exact."""
        row, part = known.singles, slice(known.singles, None)
        new, first = known.counts[part], int(known.counts[:row].sum())
        context = known.lengths[part] - new
        bounds = torch.nn.functional.pad(counts[part].cumsum(0), (1, 0)).int()
        contexts = lengths - counts
        recents = self._find_recent(table, contexts, sink)[0]
        contexts, recents = contexts[part].int(), recents[part].int()
        # A chunk that begins in the sink has less of it before.
        starts = torch.minimum(sink[part], contexts)
        exact, codes = [], []
        if context.any():
            windows, most = self.sink + self.recent, self._segment
            several = segments.plan_exact(context, new, windows, starts, recents, contexts, most)
            exact, codes = [*several], [*segments.plan_codes(context, starts, recents, most)]
        tables = page_table[part]
        return Prompts(first, tables, contexts, bounds, int(new.max()), exact, codes)

    def _buffer(
        self, name: str, rows: int, *size: int, device: torch.device, dtype: Any = torch.int32
    ) -> torch.Tensor:
        """A tensor `[rows, ...]` at an address of its own."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < rows or buffer.shape[1:] != size:
            room = max(rows, self._most_requests)
            self._buffers[name] = buffer = _new(name, room, *size, device=device, dtype=dtype)
        return buffer[:rows]

    def _plan_in_kernel(
        self, step: Step, table: torch.Tensor, lengths: torch.Tensor, mapping: torch.Tensor
    ) -> None:
        """What `_plan_in_torch` computes for single tokens, in one launch."""
        decode = step.decode
        given = table.int().contiguous(), lengths.int().contiguous(), mapping.long().contiguous()
        arguments = (
            *(given[0], table.shape[1], *given[1:], len(lengths)),
            *(self.slot_of, self._page_of, self._used, self.slots, self._now),
            *(step.pages, step.page_offsets, step.slots, decode.starts, decode.ends),
            *(decode.sink.slots, decode.sink.lengths),
            *(decode.recent.slots, decode.recent.starts, decode.recent.lengths),
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
        return build(_SOURCE.read_text(), named, self.slot_of.device).get_kernel("plan")

    def _plan_in_torch(
        self,
        step: Step,
        table: torch.Tensor,
        lengths: torch.Tensor,
        counts: torch.Tensor,
        mapping: torch.Tensor,
    ) -> None:
        starts, stored = lengths - counts, mapping.clamp(min=0)
        step.pages.copy_(stored // self.tokens)
        step.page_offsets.copy_(stored % self.tokens)
        self._forget(torch.where(step.page_offsets == 0, step.pages, 0))
        self._copy_windows(table, starts, lengths)
        step.slots.copy_(self.slot_of[step.pages])
        sink, sink_slots = self._find_sink(table, lengths)
        begin, recent_slots, skipped = self._find_recent(table, lengths, sink)
        decode = step.decode
        for target, source in (
            (decode.starts, sink),
            (decode.ends, begin),
            (decode.sink.slots, sink_slots),
            (decode.sink.lengths, sink),
            (decode.recent.slots, recent_slots),
            (decode.recent.starts, begin - skipped),
            (decode.recent.lengths, lengths - skipped),
        ):
            assert target is not None
            target.copy_(source)

    def _forget(self, pages: torch.Tensor) -> None:
        """Let these pages have no copies. Page 0 never has any."""
        self._used[self.slot_of[pages]] = 0
        self._used[0] = _NEVER
        self.slot_of[pages] = 0

    def _copy_windows(
        self, table: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Keep the copies in the windows of these requests, and give a slot to those of their pages
        that begin with a new token."""
        device = table.device
        after = (lengths - self.recent).clamp(min=0) // self.tokens
        before = (starts - self.recent).clamp(min=0) // self.tokens
        sinks = torch.arange(self.sink_pages, device=device).expand(len(table), -1)
        recent = torch.arange(self.recent_pages, device=device)
        number = torch.cat([sinks, after[:, None] + recent, before[:, None] + recent], 1)
        # No page twice: a slot would be given to it twice.
        counts = number * self.tokens < lengths[:, None]
        counts[:, self.sink_pages :] &= number[:, self.sink_pages :] >= self.sink_pages
        counts[:, -self.recent_pages :] &= number[:, -self.recent_pages :] < after[:, None]
        # A single token reads what is before it in the window that ends with itself.
        counts[:, -self.recent_pages :] &= (lengths - starts > 1)[:, None]
        pages = self._pages(table, number, counts).flatten()
        begins = (number * self.tokens >= starts[:, None]).flatten() & (pages > 0)
        self._used[self.slot_of[pages]] = self._now
        self._used[0] = _NEVER
        # The n-th page that needs a slot gets the slot that was used n-th least recently.
        order = self._used.argsort(stable=True)
        slots = order[(begins.cumsum(0) - 1).clamp(min=0, max=self.slots - 1)]
        given = begins & (self._used[slots] < self._now)
        slots, pages = torch.where(given, slots, 0), torch.where(given, pages, 0)
        former = self._page_of[slots]
        self.slot_of[torch.where(self.slot_of[former] == slots, former, 0)] = 0
        self.slot_of[pages], self._page_of[slots], self._used[slots] = slots, pages, self._now
        self.slot_of[0], self._used[0] = 0, _NEVER

    def _pages(
        self, table: torch.Tensor, number: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """The pages with these numbers `[B, W]` in their request, and 0 for those that do not
        count."""
        return torch.where(counts, table.gather(1, number.clamp(max=table.shape[1] - 1)), 0)

    def _find_sink(
        self, table: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many of the first tokens are read exact `[B]`, all of the sink or none, and the slots
        of their copies `[B, pages of the sink]`."""
        number = torch.arange(self.sink_pages, device=table.device).expand(len(table), -1)
        counts = number * self.tokens < lengths[:, None]
        slots = self.slot_of[self._pages(table, number, counts)]
        whole = ((slots > 0) | ~counts).all(1)
        return torch.where(whole, lengths.clamp(max=self.sink), 0), slots

    def _find_recent(
        self, table: torch.Tensor, lengths: torch.Tensor, sink: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From which token on `[B]` the last ones before `lengths` `[B]` are read exact: all of
        them have copies. Then the slots of these `[B, pages of the window]`, and how many tokens
        come before the first slot's `[B]`."""
        first = (lengths - self.recent).clamp(min=0) // self.tokens
        number = first[:, None] + torch.arange(self.recent_pages, device=table.device)
        counts = number * self.tokens < lengths[:, None]
        slots = self.slot_of[self._pages(table, number, counts)]
        copied = (slots > 0) | ~counts
        # Pages up to the last one that lacks its copies.
        missing = self.recent_pages - copied.flip(1).long().cumprod(1).sum(1)
        begin = torch.maximum(lengths - self.recent, (first + missing) * self.tokens)
        begin = torch.minimum(torch.maximum(begin, sink), lengths)
        return begin, slots, first * self.tokens


def _new(
    _: str, rows: int, *size: int, device: torch.device, dtype: Any = torch.int32
) -> torch.Tensor:
    return torch.empty(rows, *size, dtype=dtype, device=device)


def count_slots(layout: CacheLayout, tokens: int, most_requests: int) -> int:
    """The slots for exact copies of pages with so many tokens: as many as the windows of all
    requests touch, another window for the chunk of a prompt, and slot 0."""
    sink, recent = _window_pages(layout, tokens)
    return (sink + recent) * most_requests + recent + 1


def _window_pages(layout: CacheLayout, tokens: int) -> tuple[int, int]:
    """How many pages the sink and the recent window of a request touch at most."""
    # The recent window may begin and end inside a page.
    return -(-layout.sink // tokens), -(-(layout.recent - 1) // tokens) + 1
