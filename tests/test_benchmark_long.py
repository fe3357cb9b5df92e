"""The benchmark of long rows runs every part, here of a short row of a tiny model."""

import benchmark_long
import pytest


@pytest.mark.parametrize("parts", ["all", "collect,prompt"])
def test_every_part_has_its_line(parts, capsys, monkeypatch):
    monkeypatch.setattr(benchmark_long, "CHUNK", 128)
    shape = benchmark_long.LongShape("tiny", 1, 64, 96, 4, 2, dim=16, vocabulary=500)
    benchmark_long.run(shape, [512], parts, queries=2)
    lines = capsys.readouterr().out.splitlines()
    assert "yarn:4:32768" in lines[0]
    names = [line[10:34].strip() for line in lines[2:]]
    asked = ["collect", "prompt, exact", "prompt, one arm"]
    every = [
        "plain forward", "collect", "exact losses", "one arm, decoding", "one arm, chunks of 128",
        *asked[1:],
    ]  # fmt: skip
    assert names == (every if parts == "all" else asked)
    for line in lines[2:]:
        seconds, peak, estimate = line[34:].split()
        assert 0 < float(peak) < 20
        assert float(seconds) >= 0
        assert estimate == "-" or float(estimate) > 0
