"""The tokens of one layer in vLLM's pages: every token as codes, and beside them exact copies of
the first and last tokens of the requests that run.

A page must be readable by itself: prefix caching hands it to another request, preemption frees it,
and a prompt fills it in parts. So a token is written as codes as soon as it is there, and a copy is
kept for as long as someone reads it exact.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from rotationzoo.codec import int2
from rotationzoo.rotations import SIDES
from rotationzoo.runtime.settings import CacheSettings


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of one request."""

    rows: dict[str, torch.Tensor]
    """Side -> rows `[T, H, D]`, after RoPE."""
    pages: torch.Tensor
    """The numbers of the request's pages `[N]`, int64, in the order of its tokens."""
    length: int
    """Tokens of the request, with the new ones at its end."""

    @property
    def count(self) -> int:
        return len(self.rows["key"])

    @property
    def start(self) -> int:
        """The position of the first new token."""
        return self.length - self.count


class Pages:
    """The pages of one layer: a view of the tensor that vLLM allocates, and the exact copies."""

    def __init__(self, settings: CacheSettings, layer: int, most_requests: int):
        self.arm, self.layout = settings.arm, settings.layout
        self.layer, self.most_requests = layer, most_requests
        self.copies: OrderedDict[int, ExactPage] = OrderedDict()
        """Page -> the exact copies of its tokens, the least recently read page first."""

    def sections(self, cache: torch.Tensor) -> dict[str, int2.Quantized]:
        """Side -> the codes `[N, H, P, D / 4]`, scales and offsets `[N, H, P, G]` of all pages of
        vLLM's tensor `[N, H, P, ...]`, whose memory they share. A page holds the keys of its
        tokens, and then their values."""
        memory = cache.view(torch.uint8).flatten(1)
        sections, begin = {}, 0
        for side in SIDES:
            layout = self.arm.page_layout(self.layer, side, cache.shape[2], self.layout.format)
            sections[side] = layout.view(memory[:, begin : begin + layout.bytes])
            begin += layout.bytes
        return sections

    def write(self, cache: torch.Tensor, new: NewTokens) -> None:
        """Store new tokens as codes, and keep copies of those that later calls read exact."""
        tokens = cache.shape[2]
        position = torch.arange(new.start, new.length)
        pages, places = new.pages[position // tokens], position % tokens
        for side, sections in self.sections(cache).items():
            rows = new.rows[side].transpose(0, 1)[None]
            stored = self.arm.pack(rows, self.layer, side, self.layout.format)
            for section, value in (
                (sections.codes, stored.codes),
                (sections.scale, stored.scale),
                (sections.offset, stored.offset),
            ):
                section[pages, :, places] = value[0].transpose(0, 1).to(section.dtype)
        kept = (position < self.layout.sink) | (position >= new.length - self.layout.recent)
        for page in pages.unique().tolist():
            of_page = pages == page
            if places[of_page].min() == 0:
                self.copies.pop(page, None)  # it belongs to other tokens from now on
            chosen = of_page & kept
            if chosen.any():
                self._copy(page, tokens, places[chosen], new, position[chosen] - new.start)

    def _copy(
        self, page: int, tokens: int, places: torch.Tensor, new: NewTokens, rows: torch.Tensor
    ) -> None:
        if page not in self.copies:
            self.copies[page] = ExactPage.empty(tokens, new.rows)
        for side in SIDES:
            self.copies[page].rows[side][places] = new.rows[side][rows]
        self.copies[page].held[places] = True
        self.copies.move_to_end(page)
        # As many as the windows of all requests that may run take, each of which may begin and end
        # inside a page.
        windows = -(-self.layout.sink // tokens) + -(-self.layout.recent // tokens) + 1
        while len(self.copies) > windows * self.most_requests:
            self.copies.popitem(last=False)

    def read(self, cache: torch.Tensor, new: NewTokens) -> dict[str, torch.Tensor]:
        """Side -> the rows `[H, L, D]` of all tokens of a request, as the queries of its new tokens
        read them, in the model's frame: keys without their mean where they are centered.

        A decoding step reads the last `recent` tokens exact, itself included. Several new tokens
        read themselves exact, and the `recent` ones before them. All read the sink exact. A token
        without a copy is read from its codes.
        """
        tokens, sink = cache.shape[2], self.layout.sink
        first = new.length if new.count == 1 else new.start
        position = torch.arange(new.length)
        exact = (position < sink) | (position >= first - self.layout.recent)
        read = {}
        for side, sections in self.sections(cache).items():
            stored = int2.Quantized(
                *(
                    section[new.pages].transpose(0, 1).flatten(1, 2)[None, :, : new.length]
                    for section in (sections.codes, sections.scale, sections.offset)
                )
            )
            layout = self.arm.page_layout(self.layer, side, tokens, self.layout.format)
            restored = self.arm.restore(layout.dequantize(stored), self.layer, side)
            read[side] = restored[0].to(new.rows[side].dtype)
        for number, page in enumerate(new.pages.tolist()):
            begin = number * tokens
            wanted = exact[begin : begin + tokens]
            if page in self.copies and wanted.any():
                copy = self.copies[page]
                self.copies.move_to_end(page)
                places = (wanted & copy.held[: len(wanted)]).nonzero().flatten()
                self._overlay(read, begin + places, {s: copy.rows[s][places] for s in SIDES})
        self._overlay(read, position[new.start :], new.rows)
        return read

    def _overlay(
        self,
        read: dict[str, torch.Tensor],
        position: torch.Tensor,
        rows: dict[str, torch.Tensor],
    ) -> None:
        """Put exact rows `[T, H, D]` in the place of restored ones."""
        for side in SIDES:
            exact = self.arm.keep_exact(rows[side].transpose(0, 1)[None], self.layer, side)
            read[side][:, position] = exact[0]


@dataclass(frozen=True)
class ExactPage:
    """Copies of tokens of one page."""

    rows: dict[str, torch.Tensor]
    """Side -> `[P, H, D]`."""
    held: torch.Tensor
    """Boolean `[P]`: which of its tokens are here."""

    @classmethod
    def empty(cls, tokens: int, like: dict[str, torch.Tensor]) -> "ExactPage":
        rows = {side: of.new_empty(tokens, *of.shape[1:]) for side, of in like.items()}
        return cls(rows, torch.zeros(tokens, dtype=torch.bool))


def attend(
    query: torch.Tensor,
    read: dict[str, torch.Tensor],
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The attention output `[T, H_q, D]` of the last T tokens' queries `[T, H_q, D]` over rows
    `[H, L, D]`, computed in float32. `sinks` `[H_q]` are logits that read nothing, as in
    gpt-oss."""
    key, value = read["key"].float(), read["value"].float()
    group = query.shape[1] // len(key)
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    logits = query.float().transpose(0, 1) @ key.mT * scale
    if soft_cap:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    position = torch.arange(key.shape[1])
    later = position > position[-len(query) :, None]
    logits = logits.masked_fill(later, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, len(query), 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[1]]
    return (weights @ value).transpose(0, 1).to(query.dtype)
