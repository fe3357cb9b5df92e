"""Tasks of lm-evaluation-harness over local files: real harness code, and a model that reads its
cache in 2 bits."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from support.command_line import only_error
from support.models import save_tiny

pytest.importorskip("lm_eval", reason="lm-evaluation-harness, the extra `tasks`, is not installed")

from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate as evaluate_with_harness
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._index import TaskIndex

from rotationzoo.artifact.measured import Measured
from rotationzoo.cli.evaluate_view import show_evaluation
from rotationzoo.cli.output import Output
from rotationzoo.evaluation.arms import build_baselines
from rotationzoo.evaluation.forward import Trial
from rotationzoo.evaluation.harness.model import HarnessModel, Row
from rotationzoo.evaluation.harness.run import run_harness
from rotationzoo.evaluation.harness.scores import compare_answers
from rotationzoo.evaluation.harness.tasks import HarnessSettings, TaskLoader, save_without_code
from rotationzoo.evaluation.verdict import sign_flip
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.source import find
from rotationzoo.progress import silent
from rotationzoo.recipe import Recipe
from rotationzoo.runtime.through_cache import ThroughCache
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation

TASKS = "local_generate", "local_choice", "local_last"
QUESTIONS = 6
LIMITS = 'generation_kwargs: {until: ["\\n"], max_gen_toks: 4}'
SHARED = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
doc_to_text: "{{{{text}}}}"
num_fewshot: 1
fewshot_split: test
"""
OF_EACH = {
    "local_generate": f"""
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
{LIMITS}
metric_list: [{{metric: exact_match}}]
""",
    "local_choice": """
output_type: multiple_choice
doc_to_target: label
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_last": """
output_type: loglikelihood
doc_to_target: "{{answer}}"
metric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc}]
""",
}


def write_tasks(folder: Path, **more: str) -> Path:
    """A folder of task files over a file of questions about Python functions."""
    folder.mkdir(exist_ok=True)
    chance = random.Random(0)
    documents = []
    for number in range(QUESTIONS):
        names = [f"name_{chance.randrange(100)}" for _ in range(8)]
        body = "".join(f"    {name} = {chance.randrange(1000)}\n" for name in names)
        text = f"def function_{number}():\n{body}    return "
        choices = [names[0], "None", "self.value"]
        documents.append({"text": text, "answer": names[0], "choices": choices, "label": 0})
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    shared = SHARED.format(data=data, cache=folder / "cache")
    for name, content in {**OF_EACH, **more}.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}{shared}{content}")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def asked(tiny):
    """A small random model and its tokenizer."""
    source = find(str(tiny))
    config = loading.load_config(source)
    model = loading.load(source, config, "cpu", torch.float32)
    return model, loading.load_tokenizer(source)


def run(asked, folder, windows, names=TASKS, through=None, **settings):
    """The measures of the exact model and, as a dictionary, of the baselines."""
    model, tokenizer = asked
    settings = HarnessSettings(names, folder=folder, **settings)
    tasks = TaskLoader(settings, [512]).load(tokenizer)
    random.seed(1)
    drawn = random.Random(1).random()
    geometry = geometry_of(model)
    cache = CacheLayout(sink=windows[0], recent=windows[1])
    layers = [layer.index for layer in geometry]
    arms = build_baselines(Recipe(), geometry)[:2]
    trial = Trial(geometry, arms, [cache], layers, ("key", "value"), 0, 0, through)
    stages = []
    measured = run_harness(*asked, tasks, settings, trial, lambda *stage: stages.append(stage))
    assert random.random() == drawn, "the harness sets seeds, and puts them back"
    arms = {name: flat(scores) for (_, name), scores in measured.arms.items()}
    return flat(measured.exact), arms, stages


def flat(scores):
    """Task -> its metrics and everything else that was measured."""
    contents = {task: score.model_dump(exclude_unset=True) for task, score in scores.items()}
    return {task: content.pop("metrics") | content for task, content in contents.items()}


@pytest.fixture(scope="module")
def measured(asked, folder):
    return run(asked, folder, (4, 8))


def test_the_exact_model_scores_what_the_harness_gives_it(asked, folder, measured):
    model, tokenizer = asked
    tasks = TaskLoader(HarnessSettings(TASKS, folder=folder), [512]).load(tokenizer)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=1234)
    theirs = evaluate_with_harness(
        HFLM(pretrained=model, tokenizer=tokenizer, backend="causal"), tasks, bootstrap_iters=0
    )["results"]
    exact, _, _ = measured
    for name in TASKS:
        metrics = [key for key in theirs[name] if key.endswith(",none") and "_stderr" not in key]
        assert metrics
        for key in metrics:
            assert exact[name][key.removesuffix(",none")] == theirs[name][key]
        assert exact[name]["questions"] == QUESTIONS
    assert exact["local_last"]["standard_error"]["perplexity"] > 0


def test_log_likelihoods_read_the_2_bit_cache(measured):
    exact, arms, _ = measured
    assert list(arms) == ["identity", "hadamard"]
    assert "paired" not in exact["local_choice"]
    for arm in arms.values():
        assert arm["local_last"]["perplexity"] != exact["local_last"]["perplexity"]
        assert arm["local_last"]["paired"].keys() == {"acc"}
        assert arm["local_last"]["past_windows"] == 1
        for metric, pairing in arm["local_choice"]["paired"].items():
            gap = exact["local_choice"][metric] - arm["local_choice"][metric]
            assert pairing["lost"] - pairing["gained"] == pytest.approx(gap * QUESTIONS)
        assert arm["local_choice"]["paired"].keys() == {"acc", "acc_norm"}


def test_answers_read_the_2_bit_cache(asked):
    """Each token is the one that the whole row before it gives."""
    model, tokenizer = asked
    geometry = geometry_of(model)
    arm = build_baselines(Recipe(), geometry)[0]
    layers = {layer.index for layer in geometry}
    simulation = Simulation(arm, CacheLayout(sink=1, recent=2), geometry, layers)
    prompts = ["def f(self):\n    return self.", "import os\n\n\nclass Reader:\n    "]
    options = {"until": ["never"], "max_gen_toks": 8}
    requests = [
        Instance("generate_until", {}, (prompt, options), 0, ("task", number, 1))
        for number, prompt in enumerate(prompts)
    ]
    harness = HarnessModel(model, tokenizer, silent)
    exact = harness.generate_until(requests)
    harness.reads_simulation = True
    with simulation.running(model):
        answers = harness.generate_until(requests)
        expected = [greedy(model, tokenizer, prompt, 8) for prompt in prompts]
    assert answers == expected
    assert answers != exact == [greedy(model, tokenizer, prompt, 8) for prompt in prompts]
    lengths = [len(tokenizer(prompt).input_ids) + 7 for prompt in prompts]
    assert harness.rows == [Row("task", length, 8, truncated=True) for length in lengths * 2]


def test_a_real_cache_answers_as_the_simulation_does(asked, folder):
    names = ("local_generate", "local_last")
    reports = []
    for through in (None, ThroughCache):
        exact, arms, _ = run(asked, folder, (4, 60), names, through, limit=1)
        reports.append(arms)
        assert arms["identity"]["local_last"]["perplexity"] != exact["local_last"]["perplexity"]
    simulated, real = reports
    for name, arm in real.items():
        for metric, task in (("exact_match", "local_generate"), ("perplexity", "local_last")):
            # Measured: at most 2e-6 apart.
            assert arm[task][metric] == pytest.approx(simulated[name][task][metric], rel=1e-4)


def greedy(model, tokenizer, prompt, tokens):
    """The most likely continuation, by forward passes over whole rows."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    start = ids.shape[1]
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_truncated_answers_are_counted(asked, tmp_path):
    """No answer holds the first stop string, and all hold one of the others at once."""
    tokens = asked[1].batch_decode([[token] for token in range(len(asked[1]))])
    letters = json.dumps(sorted({*"".join(tokens)}))
    stops = {"local_endless": '["never to be said"]', "local_short": letters}
    tasks = {}
    for name, until in stops.items():
        limits = f"generation_kwargs: {{until: {until}, max_gen_toks: 3}}"
        tasks[name] = OF_EACH["local_generate"].replace(LIMITS, limits)
    folder = write_tasks(tmp_path / "tasks", **tasks)
    exact, arms, stages = run(asked, folder, (4, 8), tuple(tasks), limit=2)
    for measures in (exact, *arms.values()):
        assert measures["local_endless"]["questions"] == 2
        assert measures["local_endless"]["truncated"] == 1
        assert measures["local_endless"]["answer_tokens"] == 3
        assert measures["local_short"]["truncated"] == 0
        assert measures["local_short"]["answer_tokens"] < 3
    assert stages[-1] == ("answering, hadamard", 4, 4)


def test_mcnemar():
    lost, gained = 5, 1
    exact = [1] * lost + [0] * gained + [1, 0]
    arm = [0] * lost + [1] * gained + [1, 0]
    pairing = compare_answers(dict(enumerate(exact)), dict(enumerate(arm)))
    assert pairing.model_dump() == {
        "lost": lost,
        "gained": gained,
        "p_value": sign_flip([-1] * lost + [1] * gained),
    }


@pytest.fixture
def few_tasks(monkeypatch):
    """The harness' own list has 14,000 names and takes seconds to read; two of its folders do."""
    read_folder = TaskIndex._iter_yaml_files

    def read_some(root):
        folders = [root / "gsm8k", root / "ruler"] if (root / "gsm8k").is_dir() else [root]
        for folder in folders:
            yield from read_folder(folder)

    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", staticmethod(read_some))


def test_mistakes_are_told_before_weights_are_fetched(folder, inside, tmp_path, few_tasks):
    """The model has no weights at all."""
    model = save_tiny(tmp_path / "model")
    (model / "model.safetensors").unlink()
    words = ["evaluate", model, "--tokens", 512, "--length", 512]
    for name, nearest in ("local_generat", "local_generate"), ("ruler_niah_single_1", "niah_sin"):
        error = only_error(inside(*words, "--harness-path", folder, "--harness", name), 2)
        assert f"the harness has no task '{name}'" in error
        assert f"Hint: the nearest names are {nearest}" in error
    only_error(inside(*words, "--harness-path", folder / "none", "--harness", "gsm8k"), 2)


def test_ruler_is_given_a_tokenizer_without_code(asked, tmp_path):
    """It loads a tokenizer by its place, with remote code allowed."""
    _, tokenizer = asked
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["code.Tokenizer", None]}
    tokenizer.save_pretrained(tmp_path / "plain")
    save_without_code(tokenizer, tmp_path / "ours")
    del tokenizer.init_kwargs["auto_map"]
    config = "tokenizer_config.json"
    assert "auto_map" in (tmp_path / "plain" / config).read_text()
    assert "auto_map" not in (tmp_path / "ours" / config).read_text()
    copy = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    assert copy("def f(x):").input_ids == tokenizer("def f(x):").input_ids


def test_data_that_cannot_be_fetched_is_named_before_weights_are(folder, inside, tmp_path):
    model = save_tiny(tmp_path / "model")
    (model / "model.safetensors").unlink()
    task = (folder / "local_last.yaml").read_text()
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    gone = task.replace("questions.jsonl", "gone.jsonl").replace("local_last", "local_gone")
    (tasks / "gone.yaml").write_text(gone)
    (tasks / "code.yaml").write_text(task.replace("local_last", "local_code\nunsafe_code: true"))
    words = ["evaluate", model, "--tokens", 512, "--length", 512, "--harness-path", tasks]
    result = inside(*words, "--harness", "local_gone")
    assert result.returncode == 1
    assert "the data of the harness' task local_gone cannot be loaded: " in result.stderr
    assert "gone.jsonl" in result.stderr
    result = inside(*words, "--harness", "local_code")
    assert "local_code runs code that the model writes, which is refused" in result.stderr
    result = inside(*words, "--harness", "local_code", "--harness-chat")
    assert "--harness-chat needs a chat template" in result.stderr


def test_the_command_line(folder, inside, artifacts, tmp_path, capsys):
    artifact = shutil.copytree(artifacts[0], tmp_path / "oscar")
    words = ["evaluate", "demo", artifact, "--tokens", 512, "--length", 512, "--queries", 0]
    words += ["--windows", "4/8,64/400", "--harness", "local_generate,local_choice"]
    words += ["--harness-path", folder, "--harness-limit", 1, "--harness-answers", 2, "--save"]
    result = inside(*words, "--json")
    report = json.loads(result.stdout)
    notes = [line for line in result.stderr.splitlines() if "says little about" in line]
    assert notes == [
        f"Note: {task} says little about this cache: 0% of its rows are longer than the 464 tokens "
        "that are read exactly"
        for task in ("local_generate", "local_choice")
    ]
    assert report["harness"]["tasks"] == ["local_generate", "local_choice"]
    assert report["exact"]["harness"]["local_generate"]["questions"] == 1
    assert report["exact"]["harness"]["local_choice"]["metrics"].keys() == {"acc", "acc_norm"}
    arm = report["arms"]["oscar"]["harness"]
    assert arm["local_choice"].keys() == {
        *("metrics", "standard_error", "questions", "row_tokens", "past_windows", "paired"),
        "answers",
    }
    (question,) = arm["local_generate"]["answers"]
    documents = list(map(json.loads, (folder / "questions.jsonl").read_text().splitlines()))
    assert question["question"] == 0
    assert question["right"] == documents[0]["answer"] != question["answer"]
    chosen = report["exact"]["harness"]["local_choice"]
    (choice,) = chosen["answers"]
    assert choice["right"] == documents[0]["answer"]
    assert choice["answer"] in documents[0]["choices"]
    assert (choice["answer"] == choice["right"]) == chosen["metrics"]["acc"]
    nothing = "the exact model itself scores 0 on local_generate (exact_match): no arm can lose"
    assert sum(nothing in note for note in report["notes"]) == 1
    saved = json.loads((artifact / "evaluation.json").read_text())
    assert saved["windows"][0]["arms"]["oscar"]["harness"] == arm
    assert saved["exact"]["harness"] == report["exact"]["harness"]
    show_evaluation(Output(), Measured.model_validate(report))
    table = capsys.readouterr().out
    assert "local_generate, 1 question\n" in table
    assert f"local_generate, question 0, right: {question['right']}\n  exact: " in table
    assert "-0 +0 (p 1)" in table
    assert "truncated" in table
