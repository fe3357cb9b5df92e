"""Requests of one step that share pages read what was stored, in any order of a GPU's streams."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.server_pages import Server, draw, part_of, settings_of
from support.streams import DrawnStream, play

from rotationzoo.vllm.streams import may_meet

pytestmark = pytest.mark.usefixtures("stream_order")
CLOSE = 1e-5  # of rows around 1; 5e-7 was measured


def share(together=True, own=(9, 12), also=0, recent=6, segment=4096, most_requests=6) -> dict:
    """What requests read that begin with 16 of the 24 tokens which another one stores: in one step
    or one after another. Other requests get `also` new tokens in the same step."""
    server = Server(settings_of(recent=recent), most_requests, pages=80, segment=segment)
    rows = {"first": draw(24)} | {each: draw(count, seed=each) for each, count in enumerate(own)}
    for number in range(2 if also else 0):
        rows[f"other {number}"] = draw(20 + also, seed=20 + number)
        server.begin(f"other {number}")
        server.run({f"other {number}": part_of(rows[f"other {number}"], 0, 20)})
        rows[f"other {number}"] = part_of(rows[f"other {number}"], 20, 20 + also)
    server.begin("first")
    server.take("first", 24)
    if together:
        for request in range(len(own)):
            server.begin(request, prefix_of="first", pages=2)
        return server.run(rows)
    read = server.run({name: each for name, each in rows.items() if isinstance(name, str)})
    for request in range(len(own)):
        server.begin(request, prefix_of="first", pages=2)
        read |= server.run({request: rows[request]})
    return read


CASES = {
    "prompts": {},
    "segments": {"segment": 5},
    "few tokens next to prompts": {"own": (9, 1, 3)},
    "few tokens of others": {"also": 1},
    "a short window": {"recent": 1, "own": (9, 1), "also": 1},
}


def assert_equal(together: dict, alone: dict) -> None:
    assert together.keys() == alone.keys()
    for request, read in alone.items():
        assert (together[request] - read).abs().max() < CLOSE, request


@pytest.mark.parametrize("case", CASES)
def test_a_prefix_that_the_same_step_stores_is_read_as_one_that_is_there(case):
    """Outputs are at most 2.9. Before stores were waited for, they were 3.4 apart."""
    assert_equal(share(True, **CASES[case]), share(False, **CASES[case]))


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("recent", [1, 2, 5, 6, 12])
def test_few_tokens_right_after_those_of_another_request(new, recent):
    """The last ones of a page, which a request reads in the step in which they are stored."""

    def read(together: bool) -> dict:
        server = Server(settings_of(recent=recent), verified=3)
        rows = draw(16), draw(new, seed=1)
        server.begin("first")
        server.run({"first": part_of(rows[0], 0, 16 - new)})
        server.take("first", 16)
        server.begin("second", prefix_of="first", pages=2)
        steps = [{"first": part_of(rows[0], 16 - new, 16)}, {"second": rows[1]}]
        if together:
            return server.run(steps[0] | steps[1])
        return server.run(steps[0]) | server.run(steps[1])

    assert_equal(read(True), read(False))


FEW_SLOTS = {"most_requests": 1, "also": 1}


@pytest.mark.parametrize("case", [*CASES.values(), FEW_SLOTS], ids=[*CASES, "few slots"])
def test_in_any_order(case):
    """The halves of a store come before, between or after the parts of a read. With few slots,
    requests take those of others."""
    expected = share(**case)

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.booleans(), min_size=40, max_size=40))
    def check(draws):
        with pytest.MonkeyPatch.context() as patch:
            play(patch.setattr, DrawnStream(torch.device("cpu"), iter(draws + [True] * 999)))
            assert_equal(share(**case), expected)

    check()


def begins(held: int, *blocks: int) -> SimpleNamespace:
    return SimpleNamespace(num_computed_tokens=held, block_ids=([*blocks],))


@pytest.mark.parametrize(
    ("begin", "go_on", "resumed", "meets"),
    [
        ([begins(0, 1, 2), begins(0, 3)], ["old"], [], False),
        ([begins(16, 1, 2, 3), begins(16, 1, 2, 4)], [], [], False),
        ([begins(0, 1, 2), begins(8, 1, 3)], [], [], True),
        ([begins(8, 9, 1), begins(16, 9, 1, 3)], [], [], True),
        ([begins(8, 1, 2)], ["old"], [], True),
        ([], ["old"], [], False),
        ([], ["old"], ["old"], True),
    ],
)
def test_which_steps_may_meet_themselves(begin, go_on, resumed, meets):
    """In blocks of 8 tokens."""
    others = SimpleNamespace(req_ids=go_on, resumed_req_ids=set(resumed))
    scheduled = SimpleNamespace(scheduled_new_reqs=begin, scheduled_cached_reqs=others)
    assert may_meet(scheduled, [8]) == meets
