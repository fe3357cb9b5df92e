"""What `verify` says of whose rotations an artifact holds."""

import json
import shutil

from support.command_line import only_error, succeeded
from support.models import edited_weights

from rotationzoo import calibrate
from rotationzoo.model.source import DEMO


def test_verify_says_whose_rotations_in_one_verdict_and_checks_only_what_holds(inside, tmp_path):
    """Rotations of the model itself from 2,048 tokens; then a model of the same
    shape with other weights."""
    other = shutil.copytree(DEMO, tmp_path / "other")
    with edited_weights(other) as weights:
        for tensor in weights.values():
            tensor.neg_()
    calibrate("demo", output=inside.folder / "plain", tokens=2048, length=512, device="cpu")
    shown = succeeded(inside("verify", "plain", "--model", "demo", "--run"))
    assert shown.stdout.count("made of these weights, or of close relatives") == 1
    assert "not clear" not in shown.stdout
    assert "the weights of demo" in shown.stdout.splitlines()[-1]
    wrong = inside("verify", "plain", "--model", other)
    assert wrong.returncode == 1
    assert "Problem: made for other weights than" in wrong.stdout
    assert "the weights" not in wrong.stdout.splitlines()[-1], "which differ"
    error, hint = wrong.stderr.splitlines()
    assert error.endswith(
        f"plain is sound, but {other} is not the model that it was made for, demo"
    )
    assert hint == "Hint: check it with its own model: rotationzoo verify plain --model demo"
    shown = json.loads(inside("verify", "plain", "--model", "demo", "--json").stdout)
    listed = inside("verify", "plain", "--model", "demo").stdout.splitlines()[-1]
    assert listed == f"Checked: {', '.join(shown['checked'])}"


def test_an_export_is_no_artifact_and_is_called_by_its_name(inside, made):
    assert inside("export", made, "--to", "mlx", "--pooled", "-o", "exported").returncode == 0
    says = only_error(inside("verify", "exported"))
    assert "exported holds files for an engine, which export wrote, and is no artifact" in says
