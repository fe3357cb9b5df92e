"""The pictures that `report` adds to an artifact and its card."""

import shutil
from itertools import combinations, product

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rotationzoo.artifact import plots
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.job import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.evaluation.job import Evaluation, evaluate
from rotationzoo.evaluation.tasks.settings import TaskSettings
from rotationzoo.recipe import PRESETS, Data


@pytest.fixture(scope="module")
def demo_artifact(tmp_path_factory):
    recipe = PRESETS["oscar"].model_copy(update={"data": Data(tokens=2048, length=512)})
    output = tmp_path_factory.mktemp("plots") / "made"
    return calibrate(Job("demo", recipe, output, device="cpu")).folder


@pytest.fixture
def folder(demo_artifact, tmp_path):
    """A copy of the demo model's artifact, to change."""
    return shutil.copytree(demo_artifact, tmp_path / "artifact")


def test_pictures_for_the_card(folder, inside):
    assert inside("report", folder).returncode == 0
    assert not (folder / "error_by_layer.png").exists(), "nothing was measured yet"
    text, tasks = Data(tokens=1024, length=512), TaskSettings(())
    evaluate(Evaluation("demo", [folder], text, tasks=tasks, save_to=[folder]))
    assert inside("report", folder, "--json").returncode == 0
    for name in ("spectra.png", "error_by_layer.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in (folder / "README.md").read_text()
    assert verify(Artifact.open(folder), "demo").ok


def test_pictures_name_whole_layers_and_cover_nothing(folder, monkeypatch):
    """Ticks are at layers alone, the legend has all arms and is beside the curves, and no text
    covers another, with long names and many layers too."""
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
        assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
        for legend, axis in product(figure.legends, figure.axes):
            assert not legend.get_window_extent().overlaps(axis.get_window_extent())
    errors, spectra = drawn
    for axis in errors.axes:
        assert all(tick == int(tick) for tick in axis.get_xticks())
    assert [text.get_text() for text in errors.legends[0].get_texts()] == names
    assert spectra.axes[-1].get_ylabel() == "layer"
    assert list(spectra.axes[-1].get_yticks()) == [0, 1, 2, 3]
