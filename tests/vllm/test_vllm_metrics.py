"""What a worker counts of its exact copies, and how its numbers reach the API server."""

import os
import re
import subprocess
import sys

import pytest
from support.places import ROOT
from support.server_pages import Server, draw, part_of, settings_of


def test_a_page_that_is_stored_anew_was_not_forgotten():
    server = Server(settings_of(), most_requests=2, pages=8)
    for request in range(12):
        server.begin(request)
        server.run({request: draw(40, seed=request)})
        server.end(request)
    assert server.planner.count()[1] == 0


def test_windows_that_there_are_not_lack_nothing():
    server = Server(settings_of(sink=0, recent=1))
    server.begin(0)
    rows = draw(20)
    server.run({0: part_of(rows, 0, 19)})
    server.run({0: part_of(rows, 19, 20)})
    assert server.planner.count().tolist()[2:] == [0, 0]


WORKER = """
import json, sys, torch
from types import SimpleNamespace
from support.server_pages import Server, draw, settings_of
from support.vllm import _read_command
from rotationzoo.vllm.metrics import BadRows, Metrics

model, artifact, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = json.dumps({"rotationzoo": {"artifact": artifact}})
config = _read_command(["serve", model, "--additional-config", options], [])
config.parallel_config.data_parallel_index = 0
server = Server(settings_of(), most_requests=1)
bad_rows = BadRows({0: "first", 1: "second"}, torch.device("cpu"))
worker = SimpleNamespace(
    vllm_config=config, rank=rank, stored={0: "first", 1: "second"}, bad_rows=bad_rows
)
metrics = Metrics(worker, server.planner, .125)
server.begin(0)
server.run({0: draw(40)})
server.planner.forget(server.planner.slot_of.nonzero()[:, 0])
server.run({0: draw(1)})
bad_rows.counted[:, 0, 0] = 1 + rank
metrics.follow(ends=False)
bad_rows.counted += 1
metrics.follow(ends=False)  # within a second
if rank:
    metrics.follow(ends=True)
"""
ANSWERING = """
import subprocess, sys
from prometheus_client import REGISTRY, generate_latest
from rotationzoo.vllm import metrics

metrics.answer_for_workers()
metrics.answer_for_workers()  # as a second config does
assert b"rotationzoo" not in generate_latest(REGISTRY), "no worker is there yet"
words = [sys.executable, "-c", *sys.argv[1:]]
workers = [subprocess.Popen([*words, rank]) for rank in "01"]
assert [worker.wait() for worker in workers] == [0, 0]
print(generate_latest(REGISTRY).decode())
"""


@pytest.mark.thorough
def test_workers_write_what_another_process_answers(tiny, calibrated, tmp_path):
    """Once a second; and at once where nothing is left to run, when no request decodes."""
    pytest.importorskip("prometheus_client")
    paths = [str(ROOT), str(ROOT / "tests"), *sys.path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", ANSWERING, WORKER, tiny, calibrated.folder]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = {line for line in done.stdout.splitlines() if line.startswith("rotationzoo_")}
    slots = Server(settings_of(), most_requests=1).planner.slots - 1
    stated = {"layers": 2, "start_check_distance": 0.125, "copy_slots": slots}
    counted = ["requests_sink_from_codes", "key_rows_not_finite_total"]
    for rank, numbers in enumerate([(1, 2), (0, 6)]):
        for name, number in {**stated, **dict(zip(counted, numbers, strict=True))}.items():
            assert f'rotationzoo_{name}{{engine="0",rank="{rank}"}} {float(number)}' in said
    (named,) = (line for line in said if "artifact_info" in line and 'rank="1"' in line)
    assert f'artifact="{calibrated.identity}",engine="0",format="vllm"' in named
    assert "# TYPE rotationzoo_copies_forgotten_total counter" in done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_the_page_about_production_says_what_each_number_is():
    metrics = pytest.importorskip("rotationzoo.vllm.metrics", reason="needs prometheus_client")
    page = (ROOT / "docs/production.md").read_text("utf-8")
    rows = page.split("| `rotationzoo_` |")[1].split("\n\n")[0].splitlines()[2:]
    shown = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(shown) == sorted(metrics.METRICS)
