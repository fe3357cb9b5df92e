"""A key or value that is not finite, or too large, ends the answers only of those who read it."""

import math
from functools import cache

import pytest
import torch
from support.cases import quick_first
from support.codec import on_gpu
from support.server_pages import DIM, HEADS, Server, draw, part_of, settings_of

from rotationzoo.rotations import SIDES

BAD, AT = "bad", 12  # the request and its token, in pages of 8 tokens
SIZES = {"long": 20, "short": 13, BAD: 17, "few": 9}
STORED = [("segments", [math.inf, -math.inf, math.nan, 1e30])]
STORED += [("sglang", [math.inf]), ("vllm", [math.inf])]
CLOSE = 1e-5  # of rows around 1, as in test_vllm_pages.py


class Traffic:
    """Requests in steps of prompts, of few tokens and of both, one of which may have a bad row."""

    def __init__(self, server: Server, side: str = "key", number: float = 0.0):
        self.server, self.read, self.done = server, {}, {}
        self.times = server.tokens // 8
        self.at = AT * self.times
        names = [*SIZES, "heir", "next"]
        self.rows = {name: draw(80 * self.times, seed) for seed, name in enumerate(names)}
        if number:
            self.rows[BAD][side][self.at, 0, 3] = number
        for name in SIZES:
            self.begin(name)

    def begin(self, name: str, pages: int = 0) -> None:
        """Begin a request that shares this number of pages with the bad one."""
        self.server.begin(name, BAD, pages)
        self.done[name], self.read[name] = pages * self.server.tokens, []
        if pages:
            self.rows[name] = {
                side: torch.cat([self.rows[BAD][side][: self.done[name]], of_side])
                for side, of_side in self.rows[name].items()
            }

    def step(self, times: int = 1, **counts: int) -> None:
        new = {}
        for name, count in counts.items():
            begin = self.done[name]
            self.done[name] = end = begin + count * times
            new[name] = part_of(self.rows[name], begin, end)
        for name, output in self.server.run(new).items():
            self.read[name].append(output.float())

    def run(self, in_few: bool) -> dict[str, torch.Tensor]:
        """What each request has read; the bad row is in a prompt, or among few tokens."""
        self.step(self.times, **SIZES | ({BAD: AT - 2} if in_few else {}))
        for _ in range(2 * self.times + 1 if in_few else 3):
            self.step(**dict.fromkeys(SIZES, 1))
        self.step(long=1, short=14, bad=4, few=11)
        self.begin("heir", pages=1)  # which has no bad row
        self.step(heir=20, long=1, bad=1)
        for _ in range(2):
            self.step(heir=1, short=1, bad=1)
        # Others take its pages, which are read before they are full, and their copies.
        pages = self.server.tables[BAD][1:]
        self.server.end(BAD)
        self.server.free.sort(key=lambda page: page not in pages)
        self.begin("next")
        self.step(next=11, short=9)
        assert self.server.tables["next"][0] in pages
        for _ in range(8):
            self.step(next=1, heir=1, long=1)
        return {name: torch.cat(outputs) for name, outputs in self.read.items()}


def assert_ends_alone(server: Server, expected, side, number, in_few, close=CLOSE) -> None:
    """Compare the traffic of a server with a bad row with what is read without it."""
    traffic = Traffic(server, side, number)
    found = traffic.run(in_few)
    bad, before = found.pop(BAD), slice(traffic.at)
    for name, output in found.items():
        assert (output - expected[name]).abs().max() <= close, name
    assert (bad[before] - expected[BAD][before]).abs().max() <= close, "tokens before it"
    of_head, others = bad[-1].split(len(bad[-1]) // HEADS)
    assert of_head.isnan().all()
    assert others.isfinite().all(), "what other heads read"
    assert server.layer.bad[:, 0].tolist() == [int(side == each) for each in SIDES]
    assert server.layer.bad[SIDES.index(side), 1] >= server.tokens, "page 0 is nobody's"


@cache
def served(format: str, in_few: bool) -> tuple:
    """Settings, and what is read without a bad row."""
    settings = settings_of(format)
    server = Server(settings)
    read = Traffic(server).run(in_few)
    assert server.layer.bad[:, 0].tolist() == [0, 0]
    return settings, read


@pytest.mark.parametrize("in_few", [False, True], ids=["in a prompt", "in few tokens"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("format", "numbers"), quick_first(STORED))
def test_a_bad_row_ends_its_own_request(format, numbers, side, in_few):
    settings, expected = served(format, in_few)
    for number in numbers:
        assert_ends_alone(Server(settings), expected, side, number, in_few)


@on_gpu
@pytest.mark.parametrize("reader", ["torch", "flash"])
@pytest.mark.parametrize("in_few", [False, True], ids=["in a prompt", "in few tokens"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("format", ["vllm", "segments"])
def test_a_bad_row_ends_its_own_request_on_a_gpu(format, side, in_few, reader, device):
    """Steps of the same shapes, whose sums come in the same order."""
    settings = settings_of(format, kernel=True)

    def serve() -> Server:
        server = Server(settings, tokens=32, device=device, dtype=torch.bfloat16)
        if reader == "flash":
            flash = pytest.importorskip("rotationzoo.vllm.flash_attention")
            chosen = flash.choose_attention(DIM, torch.bfloat16, False, is_cuda=True)
            server.reader.attention = chosen
        return server

    expected = Traffic(serve()).run(in_few)
    for number in (math.inf, math.nan, 1e30):
        assert_ends_alone(serve(), expected, side, number, in_few, close=1e-2)
