"""The table of what is published."""

import json

from rotationzoo.zoo.index import WHEEL_COPY


def test_list_has_no_equal_rows_and_no_empty_columns(inside):
    """For the index that comes with the package, and for one whose entries have been evaluated."""
    lines = inside("list", "--index", WHEEL_COPY).stdout.splitlines()[1:]
    assert "revision" not in lines[0], "nobody has published one"
    assert "cost" not in lines[0]
    assert len(set(lines)) == len(lines)
    assert max(map(len, lines)) <= 80
    assert lines[-2].startswith("(1) from the folder ")
    assert sum("(1)" in line for line in lines) == 2
    content = json.loads(WHEEL_COPY.read_text())
    measured = {"answered": 61, "questions": 64, "perplexity_increase": 0.0123}
    for entry in content["entries"]:
        entry["summary"] = measured
    (inside.folder / "index.json").write_text(json.dumps(content))
    lines = inside("list", "--index", "index.json").stdout.splitlines()
    assert "answers" in lines[1]
    assert "cost" in lines[1]
    assert all("95%" in line for line in lines[2:-2])
    assert all("+1.23%" in line for line in lines[2:-2])
