"""Validation without a GPU, and what it adds to an artifact; tests/test_kernels.py has the GPU's
part."""

import json
import shutil

import pytest
import torch
from support.models import save_tiny

from rotationzoo.artifact.card import render_card
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.writer import add_files
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.kernel import draw, edge_rows, validate
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError
from rotationzoo.recipe import PRESETS, Data
from rotationzoo.storage import files


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    recipe = PRESETS["oscar"].model_copy(update={"data": Data(tokens=2048, length=512)})
    return calibrate(
        Job("demo", recipe, tmp_path_factory.mktemp("validate") / "made", device="cpu")
    ).folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "artifact")


def test_without_a_gpu_the_definition_is_checked_and_the_artifact_stays_as_it_was(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = validate(Artifact.open(folder), "demo", rows=64, device="cpu")
    assert (found["device"], found["on_gpu"], found["codes_equal"]) == ("cpu", False, None)
    assert found["rows"] == 4 * 2 * 2 * (64 + 64), (
        "drawn and captured rows of every layer, side and KV head"
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_report_of_a_gpu_is_kept(folder):
    gpu = {
        "on_gpu": True,
        "device": "NVIDIA H200",
        "rows": 1,
        "codes_equal": True,
        "dequantized_equal": True,
    }
    add_files(Artifact.open(folder), {"validation.json": b"{}"}, {"validation": gpu})
    validate(Artifact.open(folder), rows=64, device="cpu")
    assert (folder / "validation.json").read_bytes() == b"{}"
    assert "On NVIDIA H200, `int2.cu` gave" in (folder / "README.md").read_text()


def test_a_wrong_rotation_fails(folder, monkeypatch):
    """The product is compared with one in float64, so a rotation of lower precision is found."""
    exact = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor,
        "__matmul__",
        lambda a, b: (
            exact(a.bfloat16(), b.bfloat16()).float() if a.dtype == torch.float32 else exact(a, b)
        ),
    )
    with pytest.raises(
        RotationZooError, match=r"layers\.0\.key, head \d, row \d+: the kernel's rotation is off"
    ):
        validate(Artifact.open(folder), rows=64, device="cpu")
    assert not (folder / "validation.json").exists()


def test_another_model_is_refused(folder, tmp_path):
    with pytest.raises(RotationZooError, match="was not made for"):
        validate(Artifact.open(folder), str(save_tiny(tmp_path / "other")), rows=64, device="cpu")


def test_drawn_rows_have_the_moments_and_heavy_tails():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(2, 16, 16, generator=generator, dtype=torch.float64)
    mean = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    rows = draw(
        (mean, root @ root.mT + mean[:, :, None] * mean[:, None]), 2, 20000, 16, seed=1
    ).double()
    assert (rows.median(1).values - mean).abs().max() < 0.1 * root.norm(dim=-1).max()
    shape = (rows - mean[:, None]).mT @ (rows - mean[:, None])
    expected = root @ root.mT
    for head in range(2):
        one, other = shape[head] / shape[head].trace(), expected[head] / expected[head].trace()
        assert (one - other).norm() < 0.1 * other.norm()
    lengths = (rows - mean[:, None]).norm(dim=-1)
    assert lengths.max() > 20 * lengths.median()
    assert torch.equal(draw(None, 1, 8, 16, seed=3), draw(None, 1, 8, 16, seed=3))
    assert edge_rows(64, 1e18).abs().max() == 1e18


def test_a_full_disk_leaves_the_artifact_as_it_was(folder, monkeypatch):
    artifact = Artifact.open(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write = files.write_new

    def full(path, data):
        if path.name == "manifest.json":
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(files, "write_new", full)
    with pytest.raises(RotationZooError, match="No space left"):
        add_files(artifact, {"evaluation.json": b"{}"}, {"new": 1})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_command_line(inside):
    assert (
        inside("calibrate", "demo", "--quiet", "--tokens", "1024", "--length", "256").returncode
        == 0
    )
    shown = inside("validate", "rotations/demo-oscar", "--json", "--device", "cpu")
    assert shown.returncode == 0
    keys = {
        "device",
        "rows",
        "codes_equal",
        "dequantized_equal",
        "max_difference",
        "copy_bytes_per_second",
    }
    assert keys <= json.loads(shown.stdout).keys()
    assert (
        "Not validated on a GPU"
        in inside("validate", "rotations/demo-oscar", "--device", "cpu").stdout
    )
    missing = inside("validate", "nowhere")
    assert missing.returncode == 1
    assert "is no artifact" in missing.stderr
    if not torch.cuda.is_available():
        before = {
            path.name: path.read_bytes()
            for path in (inside.folder / "rotations" / "demo-oscar").iterdir()
        }
        without = inside("validate", "rotations/demo-oscar")
        assert without.returncode == 1
        assert "is not validated: the CUDA reference needs an NVIDIA GPU" in without.stderr
        after = {
            path.name: path.read_bytes()
            for path in (inside.folder / "rotations" / "demo-oscar").iterdir()
        }
        assert after == before
        assert inside("validate", "rotations/demo-oscar", "--device", "cuda").returncode == 2


def test_pictures_for_the_card(folder, inside):
    from rotationzoo.evaluation.job import Evaluation, evaluate

    assert inside("report", folder).returncode == 0
    assert not (folder / "error_by_layer.png").exists(), "nothing was measured yet"
    evaluate(Evaluation("demo", [folder], Data(tokens=1024, length=512), save_to=[folder]))
    assert inside("report", folder, "--json").returncode == 0
    for name in ("spectra.png", "error_by_layer.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in (folder / "README.md").read_text()
    assert verify(Artifact.open(folder), "demo").ok


def test_pictures_name_whole_layers_and_cover_nothing(folder, monkeypatch):
    """Ticks at layers alone, a legend of all arms beside the curves, no text over another, long
    names or many layers or not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from rotationzoo.artifact import plots

    drawn = []
    monkeypatch.setattr(plots, "_png", lambda figure: drawn.append(figure) or b"")
    layers = range(0, 60, 3)
    rows = [
        {"layer": layer, "output_error": 0.1 + layer, "attention_kl": 0.01 + layer}
        for layer in layers
    ]
    names = ["Qwen3-4B-Thinking-2507-imported-twice", "identity", "hadamard", "random"]
    arms = {name: {"by_layer": rows} for name in names}
    plots._error_by_layer({"own_arm": names[0], "windows": [{"arms": arms}]})
    plots._spectra(Artifact.open(folder))
    for figure in drawn:
        FigureCanvasAgg(figure).draw()
        texts = [axis.title for axis in figure.axes] + [axis.xaxis.label for axis in figure.axes]
        texts += [axis.yaxis.label for axis in figure.axes] + [
            text for legend in figure.legends for text in legend.get_texts()
        ]
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
        assert not any(one.overlaps(other) for n, one in enumerate(boxes) for other in boxes[:n])
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
        for legend in figure.legends:
            assert not any(
                legend.get_window_extent().overlaps(axis.get_window_extent())
                for axis in figure.axes
            )
    errors, spectra = drawn
    for axis in errors.axes:
        assert all(tick == int(tick) for tick in axis.get_xticks())
    assert [text.get_text() for text in errors.legends[0].get_texts()] == names
    assert spectra.axes[-1].get_ylabel() == "layer"
    assert list(spectra.axes[-1].get_yticks()) == [0, 1, 2, 3]


def test_the_card_has_what_the_hub_understands(tmp_path):
    import yaml

    model = save_tiny(tmp_path / "model")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\nwords")
    made = calibrate(
        Job(
            str(model),
            PRESETS["oscar"].model_copy(update={"data": Data(tokens=512, length=256)}),
            tmp_path / "a",
        )
    )
    front = yaml.safe_load((made.folder / "README.md").read_text().split("---")[1])
    assert front == {
        "library_name": "rotationzoo",
        "tags": ["kv-cache", "2-bit", "rotation"],
        "license": "apache-2.0",
    }
    hub_model = made.content | {
        "model": made.content["model"] | {"id": "a/b", "revision": "0" * 40}
    }
    front = yaml.safe_load(render_card(hub_model).split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("a/b", "quantized")
    for name, file in made.content["files"].items():
        assert (
            f"| {name} | {file['size']:,} | `{file['sha256']}` |"
            in (made.folder / "README.md").read_text()
        )
