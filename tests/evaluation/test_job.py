"""The evaluation job: its report on the screen, in JSON and in the card, and its arms."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from support import architectures
from support.command_line import edited_manifest, only_error
from support.models import save_family, save_tiny
from support.published import ok
from support.recipes import QUICK
from support.reports import evaluate

from rotationzoo.artifact.scores import ALL_ELSE
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.checks.verify import verify
from rotationzoo.cli import evaluate as evaluate_view
from rotationzoo.cli.output import Output
from rotationzoo.codec.size import CONTEXT
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation import prepare as job_module
from rotationzoo.evaluation.arms import BASELINES, RIVALS, build_arms
from rotationzoo.evaluation.evaluate import evaluate as run_evaluation
from rotationzoo.evaluation.forward import Losses
from rotationzoo.evaluation.prepare import Evaluation
from rotationzoo.evaluation.tasks import answering
from rotationzoo.evaluation.tasks.answering import ExactAnswers
from rotationzoo.evaluation.tasks.prompts import TaskSettings
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.source import DEMO, find
from rotationzoo.recipe import Data
from rotationzoo.report.tables import stored_bits
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import read_corpus

NO_TASKS = TaskSettings(())  # test_tasks.py is about them


def test_the_report(artifacts):
    options = dict(windows=[(8, 32), (32, 96)], tasks=NO_TASKS, save_to=artifacts)
    job = Evaluation("demo", artifacts, Data(tokens=384, length=192), **options)
    report = evaluate(job)
    names = ["attention", "oscar-v1", "identity", "hadamard", "random", "kivi"]
    assert list(report["arms"]) == [*names[:2], "attention+transform", *names[2:], ALL_ELSE]
    assert report["first_position"] == 128, "the same tokens for every window"
    assert report["tokens"] == 2 * (192 - 128 - 1)
    small, large = (window["arms"] for window in report["windows"])
    assert small == report["arms"]
    for name in names:
        for arm in (small[name], large[name]):
            ratio = arm["perplexity"] / report["exact"]["perplexity"]
            assert ratio == pytest.approx(1 + arm["perplexity_increase"])
            assert arm["standard_error"]["perplexity_increase"] > 0
            assert arm["perplexity_increase"] != 0
        assert small[name]["bits_per_element"] < large[name]["bits_per_element"]
    assert small["attention"]["perplexity"] < small["identity"]["perplexity"]
    for folder in artifacts:
        saved = Artifact.open(folder)
        assert verify(saved, "demo").ok
        content = json.loads((folder / "evaluation.json").read_text())
        kept = [folder.name]
        if saved.recipe.transform:
            kept.append(f"{kept[0]}+transform")
        arms = content["windows"][0]["arms"]
        assert list(arms) == [*kept, *BASELINES, ALL_ELSE]
        for name, arm in arms.items():
            assert arm["artifact"] == (saved.identity if name in kept else None)
        assert saved.measured.model_dump() == content
        apart = content.keys() ^ report.keys()
        assert apart == {"arms", "verdict", "probes"}, "docs/tasks.md says which differ"
        assert f"| {folder.name} |" in (folder / "README.md").read_text()
    text = Data(tokens=96, length=96)
    changes = dict(data=text, windows=[(8, 32)], save_to=[], baselines=("identity",))
    narrow = replace(job, artifacts=artifacts[:1], **changes)
    first = evaluate(narrow)
    assert first["first_position"] == 40
    assert evaluate(narrow)["arms"] == first["arms"], "the same job, the same figures"


def test_rivals_are_measured_where_somebody_asks_for_them(inside, tiny):
    few = ["--tokens", 512, "--length", 512, "--tasks", "none"]
    names = "fp8, int4_per_token_head"
    shown = inside("evaluate", tiny, *few, "--rivals", names, "--details")
    assert f"{names}: caches of other engines, simulated" in " ".join(shown.stdout.split())
    names = "fp8,q4_0"
    arms = ok(inside("evaluate", "demo", *few, "--rivals", names, "--json"))["arms"]
    assert list(arms) == [*BASELINES, "q4_0", "fp8"]
    # 512 tokens, of which 64 and 256 are exact.
    share = (512 - 64 - 256) / 512
    for name, bits in (("q4_0", 4.5), ("fp8", 8)):
        assert arms[name]["bits_at_length"] == pytest.approx(share * bits + (1 - share) * 16)
        assert abs(arms[name]["perplexity_increase"]) < arms["identity"]["perplexity_increase"]
    refused = inside("evaluate", "demo", *few, "--rivals", "fp9")
    assert refused.returncode == 2
    assert "there is no rival 'fp9' (did you mean 'fp8'?)" in refused.stderr
    assert all(name in refused.stderr for name in RIVALS), "the hint names all"


def test_an_interrupt_in_a_later_round_keeps_the_rounds_before(induction, mine, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(answering, "_ask_more", interrupt)
    tasks, text = TaskSettings(("needles",)), Data(tokens=512, length=512)
    job = Evaluation(str(induction), [mine], text, tasks, baselines=())
    report = evaluate(job)
    assert report["tasks"]["questions"] == 16
    assert "interrupted: 16 questions of each task count" in report["notes"]
    (decision,) = report["verdict"]["decisions"]
    assert decision["action"] == "ask", "two prompts show nothing"


def test_perplexity_is_that_of_the_model():
    text = Data(tokens=512, length=512)
    options = dict(tasks=NO_TASKS, device="cpu", baselines=("identity",))
    report = evaluate(Evaluation("demo", [], text, **options))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    data = Data(source=str(HELD_OUT), tokens=512, length=512)
    ids = read_corpus(data, loading.load_tokenizer(find("demo"))).rows[0][None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, 320:-1], ids[0, 321:])
    assert report["exact"]["perplexity"] == pytest.approx(math.exp(loss.item()), rel=1e-5)


def lost(losses: list[list[float]]) -> Losses:
    sums = Losses()
    for of_text in losses:
        sums.add(torch.tensor([of_text]))
    return sums


def test_an_arm_beside_the_exact_model():
    exact = lost([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    arm = lost([[1.0, 1.2, 1.4, 1.4], [2.0, 2.0, 2.6, 2.6]])
    report = arm.measure_arm(exact).model_dump()
    assert exact.measure_exact().text_tokens == [4, 4]
    assert exact.measure_exact().text_losses == [1, 2]
    assert report["perplexity"] == pytest.approx(math.exp(1.775))
    assert report["perplexity_increase"] == pytest.approx(math.expm1(0.275))
    # Texts lose 0.25 and 0.3: their mean is off by 0.025, and so is its logarithm.
    error = report["standard_error"]["perplexity_increase"]
    assert error == pytest.approx(math.exp(0.275) * 0.025, rel=1e-4)


def test_longer_texts_weigh_more_and_one_text_has_no_standard_error():
    exact, arm = lost([[1.0], [1.0, 1.0, 1.0]]), lost([[1.4], [1.0, 1.0, 1.0]])
    assert arm.measure_arm(exact).perplexity_increase == pytest.approx(math.expm1(0.1))
    report = lost([[1.0, 2.0]]).measure_arm(lost([[1.0, 1.0]]))
    assert report.standard_error == {"perplexity_increase": None}


def test_a_layer_in_2_bits_is_so_for_all_that_read_its_cache(tmp_path):
    """In a model whose last layers share caches."""
    folder = save_family("gemma4", tmp_path / "gemma4")
    options = dict(data=Data(tokens=32, length=32), windows=[(2, 4)], tasks=NO_TASKS)
    report = evaluate(Evaluation(str(folder), [], layers={1}, **options))
    owners = {layer.index: layer.owner for layer in geometry_of(architectures.build("gemma4"))}
    assert report["layers"] == [layer for layer, owner in owners.items() if owner == 1]
    assert len(report["layers"]) > 1
    assert report["arms"]["random"]["perplexity_increase"] != 0


def test_weights_on_disk_give_the_same_report(tiny, monkeypatch):
    """Also of a model whose shapes only its weights can tell: its first ones lie on disk, too."""
    monkeypatch.setattr(job_module, "geometry_on_meta", lambda model: None)
    monkeypatch.setattr(ExactAnswers, "can_do", True)  # or no arm is asked
    options = dict(windows=[(16, 64)], prefill_chunk=64, dtype="float32")
    text, tasks = Data(tokens=256, length=256), TaskSettings(("needles",), questions=1)
    job = Evaluation(str(tiny), [], text, tasks, **options)
    on_disk = replace(job, device_map="auto", max_memory="cpu=1KB")
    spread = evaluate(on_disk)
    assert spread["arms"]["kivi"]["all_tasks"]["questions"]
    assert spread == evaluate(job)


# ---- further arms of an artifact: with transform coding, and with one rotation per layer


@pytest.mark.thorough
def test_both_ways_to_store_rows_are_arms_and_transform_coding_is_judged(induction, mine, capsys):
    tasks = TaskSettings(("quote",), questions=8)
    text = Data(tokens=512, length=256)
    options = dict(baselines=("identity", "hadamard"), device="cpu", save_to=[mine])
    measured = run_evaluation(Evaluation(str(induction), [mine], text, tasks, **options))
    report = measured.report()
    assert list(report["arms"]) == ["mine", "mine+transform", "identity", "hadamard", ALL_ELSE]
    nearest, coded = (report["arms"][name] for name in ("mine", "mine+transform"))
    assert abs(coded["perplexity_increase"]) < abs(nearest["perplexity_increase"])
    assert coded["tasks"]["quote"]["questions"] == 8
    by_shapes = stored_bits(Artifact.open(mine), CONTEXT)
    assert by_shapes == pytest.approx(coded["bits_per_element"])
    verdict = report["verdict"]
    evaluate_view.show_evaluation(Output(), measured)
    assert capsys.readouterr().out.splitlines() == verdict["words"] == str(measured).splitlines()
    saved = json.loads((mine / "evaluation.json").read_text())
    assert saved["windows"][0]["verdict"] == verdict
    card = (mine / "README.md").read_text()
    assert "+transform: channels that do not correlate" in card
    assert f"* {verdict['words'][0]}\n" in card
    (decision,) = verdict["decisions"]
    assert decision["arm"] == "mine+transform"
    assert [rival["name"] for rival in decision["rivals"]] == ["identity", ALL_ELSE]


def test_arms_of_artifacts_come_first_and_no_two_have_one_name(induction, mine, tmp_path):
    taken = shutil.copytree(mine, tmp_path / "mine+transform")
    artifacts = [Artifact.open(folder) for folder in (taken, mine, mine)]
    arms = build_arms(artifacts, artifacts[0].geometry)
    # The second would give its arm with transform coding the name of the first.
    hashed = f"mine {artifacts[0].identity[:8]}"
    assert [each.name for each in arms[:3]] == ["mine+transform", hashed, f"{hashed} (3)"]
    assert len({each.about.name for each in arms}) == len(arms) == 6 + len(BASELINES) + 1
    assert [each.about.rounding for each in arms[:6]] == ["nearest"] * 3 + ["transform"] * 3


def drop_statistics(folder: Path) -> None:
    (folder / "statistics.safetensors").unlink()
    with edited_manifest(folder) as manifest:
        del manifest["files"]["statistics.safetensors"]


def test_a_hadamard_matrix_has_all_else_of_the_artifact(mine, tmp_path):
    artifact = Artifact.open(mine)
    arms = build_arms([artifact], artifact.geometry, ["hadamard"], uncentered=["value"])
    own, *_, last = arms
    assert (last.name, last.about.kind, last.codec.rounding) == (ALL_ELSE, "baseline", "transform")
    for layer, side, changed in last.codec.rotations.each():
        first = own.codec.rotations[layer][side]
        assert changed.matrix.abs().allclose(torch.tensor(changed.dim**-0.5))
        assert (changed.mean is None) == (first.mean is None) == (side == "value")
        assert changed.mean is None or changed.mean.equal(first.mean)
        assert not changed.transform.equal(first.transform)
    drop_statistics(bare := shutil.copytree(mine, tmp_path / "bare"))
    names = [arm.name for arm in build_arms([Artifact.open(bare)], artifact.geometry)]
    assert ALL_ELSE not in names


TEXT = Data(tokens=1024, length=256)


def test_the_arm_is_that_of_a_recipe_that_pools(tmp_path):
    model = save_tiny(tmp_path / "model", num_key_value_heads=2)
    made = {}
    for pooling in ("head", "layer"):
        changes = {"data": TEXT, "sink": 16, "recent": 64, "pooling": pooling}
        recipe = QUICK.model_copy(update=changes)
        made[pooling] = calibrate(Job(str(model), recipe, tmp_path / pooling, device="cpu"))
    assert made["head"].rotations.per_head
    options = dict(tasks=NO_TASKS, device="cpu", baselines=(), pooled=True)
    folders = [artifact.folder for artifact in made.values()]
    arms = evaluate(Evaluation(str(model), folders, TEXT, **options))["arms"]
    own = ["head", "layer"]
    assert list(arms) == [*own, "head+pooled"], "the other one is pooled already"
    assert arms["head+pooled"]["text_losses"] == arms["layer"]["text_losses"]
    assert arms["head+pooled"]["text_losses"] != arms["head"]["text_losses"]


def test_transform_coding_is_refused_for_artifacts_without_it(made):
    with pytest.raises(RotationZooError, match="codes of transform coding, and no nearest ones"):
        run_evaluation(Evaluation("demo", [made], TEXT, format="segments"))


def test_what_cannot_be_pooled_is_refused_before_a_model_is_read(inside, made, tmp_path):
    drop_statistics(copied := shutil.copytree(made, tmp_path / "copied"))
    error = only_error(inside("evaluate", "no-such-model", copied, "--pooled"))
    assert "cannot be pooled: it has no statistics" in error
    error = only_error(inside("evaluate", "no-such-model", "--pooled"), 2)
    assert "--pooled is for artifacts with one rotation per KV head" in error
