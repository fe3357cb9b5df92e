"""The scripts that ablate recipes on deep models: the gains of steps, and the rule by which they
stay."""

import json

import ablation_tables
import pytest
from ablation_tables import Gain


def line(arm: str, correct: str, logs: list[float]) -> dict:
    task = {"correct": correct, "log_probabilities": logs, "prompts": [2, 2]}
    return {"model": "deep", "setting": "2048", "arm": arm, "tasks": {"needles": task}}


def test_gains_are_paired_by_prompt_and_nats_count_what_the_exact_model_answers(tmp_path):
    lines = [
        line("exact", "1110", [0.0, 0.0, 0.0, -9.0]),
        line("oscar+fb", "1110", [-1.0, -1.0, -1.0, -1.0]),
        line("oscar", "1000", [-2.0, -2.0, -4.0, -9.0]),
    ]
    path = tmp_path / "part-0.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    ((place, arms),) = ablation_tables.read_lines([path]).items()
    assert place == ("deep", "2048")
    gain = ablation_tables.measure_gain(arms, "oscar+fb", "oscar")
    # Each of the two prompts gains one answer of four: there is no spread.
    assert gain.points == 50
    assert gain.points_error == 0
    assert gain.nats == pytest.approx((1 + 1 + 3) / 3)
    assert ablation_tables.measure_gain(arms, "oscar", "hadamard") is None


def test_a_model_that_answers_nothing_is_left_out(tmp_path):
    path = tmp_path / "part-0.jsonl"
    path.write_text(json.dumps(line("exact", "0000", [-9.0] * 4)) + "\n")
    assert ablation_tables.read_lines([path]) == {}


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ({"a": [2.0, 2.0], "b": [0.5, 0.5]}, True),
        ({"a": [0.1, 0.1], "b": [0.1, 0.1]}, False),  # less than a standard error
        ({"a": [9.0, 9.0], "b": [-2.0, -2.0]}, False),  # one model loses clearly
        ({"a": [9.0, 9.0], "b": [-0.9, -0.9]}, True),  # but not a point
    ],
)
def test_a_step_stays_by_the_rule(points, kept):
    gains = {
        model: [Gain(each, 0.5, 0.0, 0.1) for each in of_model]
        for model, of_model in points.items()
    }
    assert ablation_tables.stays(gains) == kept
