"""The public API: seven names, of which none is imported before it is asked for."""

from functools import partial
from inspect import Parameter, signature

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from support.command_line import run_apart
from support.recipes import QUICK as RECIPE
from support.reports import short_probes

import rotationzoo
from rotationzoo import Artifact, RotatedCache, Rotations, calibrate, evaluate, generate, pull
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.evaluation.arms import BASELINES
from rotationzoo.progress import silent
from rotationzoo.settings import CalibrationSettings, EvaluationSettings, GenerationSettings
from rotationzoo.zoo import index
from rotationzoo.zoo.lookup import LoadedIndex
from rotationzoo.zoo.pull import Pulled

SLOW = {"torch", "transformers", "datasets", "modelscope", "safetensors", "numpy"}
QUICK = """
import rotationzoo
dir(rotationzoo)
rotationzoo.__version__
from rotationzoo.codec import formats
from rotationzoo.codec.engine_needs import ENGINE_NAMES
from rotationzoo.cli.app import main
mistakes = "--recipe oscr", "--bits 1", "--key-bits 3", "--bits abc"
for words in ("", "--help", *(f"calibrate demo {options}" for options in mistakes)):
    assert "huggingface_hub" not in sys.modules or "demo" in words
    try:
        main(words.split())
    except SystemExit as stopped:
        assert bool(stopped.code) == ("demo" in words)
"""


def test_no_slow_library_is_imported_before_it_is_needed():
    _, imported = run_apart(QUICK)
    assert not imported & SLOW


def test_the_public_names():
    shown = {name for name in dir(rotationzoo) if not name.startswith("__")}
    assert shown == {*rotationzoo.__all__} - {"__version__"}
    assert all(getattr(rotationzoo, name) is not None for name in rotationzoo.__all__)
    names: dict = {}
    exec("from rotationzoo import *", names)
    assert set(rotationzoo.__all__) <= names.keys()
    with pytest.raises(AttributeError, match="module 'rotationzoo' has no attribute 'calibrated'"):
        rotationzoo.calibrated  # noqa: B018


def test_calibrate_takes_settings_tells_its_progress_and_returns_the_artifact(tmp_path):
    recipe, stages = RECIPE.model_copy(update={"name": "mine"}), []
    settings = dict(recipe=recipe, tokens=1024, length=256, seed=3, batch=2)
    output = str(tmp_path / "out")
    artifact = calibrate(
        "demo", output=output, progress=lambda stage, *_: stages.append(stage), **settings
    )
    assert isinstance(artifact, Artifact)
    assert isinstance(artifact.rotations, Rotations)
    assert (artifact.recipe.name, artifact.recipe.data.seed) == ("mine", 3)
    assert artifact.manifest.calibration.tokens == 1024
    assert artifact.content["run"]["batch"] == 2
    assert "calibrating" in stages
    opened = Artifact.open(output)
    assert opened.content == artifact.content
    assert opened.folder == tmp_path / "out"


def test_bars_are_shown_unless_progress_is_silent(tmp_path, capsys):
    settings = dict(recipe=RECIPE, tokens=512, length=256)
    enable_progress_bars()  # which the fixtures turned off
    try:
        calibrate("demo", output=tmp_path / "silent", progress=silent, **settings)
        assert "calibrating" not in capsys.readouterr().err
        calibrate("demo", output=tmp_path / "shown", **settings)
        assert "calibrating: 100%" in capsys.readouterr().err
    finally:
        disable_progress_bars()


def test_what_people_call_shows_every_option_and_says_what_it_is():
    for public in (calibrate, evaluate, generate, pull, RotatedCache):
        parameters = signature(public).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        assert not kinds & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}, public
        described = public.__doc__ or ""
        if public in (evaluate, generate):  # which refer to these
            described += f"{calibrate.__doc__}{RotatedCache.__doc__}"
        assert not [name for name in parameters if f"`{name}`" not in described], public


def test_the_defaults_that_people_see_and_none_make_the_same_job():
    for public, settings, words in (
        (calibrate, CalibrationSettings, ["demo"]),
        (evaluate, EvaluationSettings, ["demo"]),
        (generate, partial(GenerationSettings, rotations=None), ["demo", "def"]),
    ):
        parameters = list(signature(public).parameters.values())[len(words) :]
        shown = {each.name: each.default for each in parameters if each.default is not each.empty}
        assert settings(*words, **shown) == settings(*words)
        assert settings(*words, **dict.fromkeys(shown)) == settings(*words)


@pytest.mark.parametrize("public", [calibrate, evaluate, generate])
def test_what_is_no_option_is_refused_by_name(public):
    needed = {"prompt": "def", "rotations": None} if public is generate else {}
    with pytest.raises(TypeError, match=rf"{public.__name__}\(\) got an unexpected .* 'device'"):
        public("demo", devise="cpu", **needed)
    with pytest.raises(TypeError, match=rf"{public.__name__}\(\) missing .* argument: 'model'"):
        public(**needed)
    with pytest.raises(UsageError, match=r"there is no device 'cupid'"):
        public("demo", device="cupid", **needed)


def test_evaluate_takes_artifacts_and_folders(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = calibrate("demo", output="other", recipe="hadamard")
    short = dict(tokens=128, length=128, windows=[(4, 16)], tasks=[])
    report = evaluate("demo", [str(made), other], save=False, **short)
    assert list(report["arms"]) == ["made", "other", *BASELINES]
    assert "evaluation.json" not in Artifact.open("other").manifest.files
    with short_probes():
        evaluate("demo", other, save=True, **short)
    assert "evaluation.json" in Artifact.open("other").manifest.files


def test_files_that_are_no_artifact_are_not_returned_as_one(monkeypatch, tmp_path):
    """Those that OSCAR's makers publish are imported with the model that they are for."""
    entry = index.read(index.WHEEL_COPY).entries[0]
    pulled = Pulled(tmp_path, entry, entry.copies[0], None, {})
    monkeypatch.setattr("rotationzoo.zoo.pull.pull_first", lambda *_, **__: pulled)
    loaded = LoadedIndex(index.Index(), "an index")
    monkeypatch.setattr("rotationzoo.zoo.pull.find_index", lambda *_: loaded)
    monkeypatch.setattr("rotationzoo.zoo.pull.choose_entry", lambda *_: (entry, entry.copies, ""))
    with pytest.raises(RotationZooError, match="are not an artifact") as refusal:
        pull(entry.model)
    assert refusal.value.hint.startswith("make one of them: rotationzoo import ")
