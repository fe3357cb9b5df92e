"""The workflows: valid, pinned, without credentials where foreign code runs; and their commands do what they should."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from loopback import huggingface, modelscope
from published import ms_environment
from test_zoo import CONFIG, change_weights

from rotationzoo import index
from rotationzoo.source import DEMO

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NAMES = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


@NAMES
def test_the_workflow_is_one_that_github_takes(path):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@NAMES
@pytest.mark.skipif(not shutil.which("actionlint"), reason="needs actionlint")
def test_actionlint_finds_nothing(path):
    done = subprocess.run(["actionlint", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@NAMES
def test_actions_are_pinned_and_nothing_is_pasted_into_a_script(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"])
        assert "${{" not in step.get("run", ""), "values reach a script through its environment only"
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_only_the_publisher_holds_credentials():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "regenerate.yml").read_text())["jobs"]
    for name in ("plan", "build"):
        assert "secrets." not in json.dumps(jobs[name])
        assert "permissions" not in jobs[name]
        assert "environment" not in jobs[name]
    assert jobs["publish"]["environment"] == "hub-release"
    assert jobs["publish"]["permissions"] == {"contents": "read", "id-token": "write"}
    assert "self-hosted" not in json.dumps(jobs["publish"])


@pytest.fixture
def runner(command, tmp_path):
    """The checkout of a workflow: the shell runs its lines with `rotationzoo` on the path, against loopback hubs."""
    with huggingface.serve() as hf, modelscope.serve() as ms:
        hf.create("someone/model")
        hf.commit("someone/model", {path.name: path.read_bytes() for path in DEMO.iterdir()})
        (command.folder / "configs").mkdir()
        (command.folder / "configs" / "model.yaml").write_text(CONFIG)
        (command.folder / "scripts").symlink_to(ROOT / "scripts")
        bin_folder = tmp_path / "bin"
        bin_folder.mkdir()
        for name, words in {"rotationzoo": "-m rotationzoo", "python": ""}.items():
            (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (bin_folder / name).chmod(0o755)
        environment = command.environment | ms_environment(ms, tmp_path)
        environment |= {"HF_ENDPOINT": hf.endpoint, "HF_TOKEN": hf.token, "HF_HUB_DISABLE_XET": "1", "ZOO": "someone/zoo"}
        environment["PATH"] = f"{bin_folder}:{environment['PATH']}"

        def run(script: str, **variables: str) -> str:
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", script], cwd=command.folder, env=environment | variables,
                capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        yield SimpleNamespace(run=run, hf=hf, ms=ms, folder=command.folder, output=tmp_path / "github-output")


def scripts(job: str) -> list[str]:
    """The lines of a job that call rotationzoo."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "regenerate.yml").read_text())
    return [step["run"] for step in workflow["jobs"][job]["steps"] if "rotationzoo " in step.get("run", "")]


def plan(runner, only: str = "") -> dict:
    runner.output.write_text("")
    for script in scripts("plan"):
        runner.run(script, GITHUB_OUTPUT=str(runner.output), ONLY=only)
    return dict(line.split("=", 1) for line in runner.output.read_text().splitlines())


def test_the_commands_of_the_workflow_publish_a_new_revision(runner):
    shorter = {"--device-map auto": "--device cpu --tokens 1024 --length 256"}  # the runner of this test has no GPU
    change_weights(runner, "someone/model")
    first = plan(runner)
    (row,) = json.loads(first["matrix"])["include"]
    assert (first["any"], row["model"], row["name"]) == ("true", "someone/model", "someone__model")
    for script in scripts("build"):
        for old, new in shorter.items():
            assert old in script
            script = script.replace(old, new)
        runner.run(script, MODEL=row["model"], REVISION=row["revision"], NAME=row["name"])
    to_hugging_face, to_modelscope = scripts("publish")
    runner.hf.create("someone/zoo")  # by hand: a trusted publisher cannot make one
    runner.run(to_hugging_face, HF_OIDC_RESOURCE="")
    assert "not published to ModelScope" in runner.run(to_modelscope, MODELSCOPE_API_TOKEN="")
    runner.run(to_modelscope, MODELSCOPE_API_TOKEN="ms_test")
    assert "zoo_index.json" not in runner.hf.files("someone/zoo"), "a pull request, and no commit"
    for files in (runner.hf.files("someone/zoo", "refs/pr/1"), runner.ms.files("someone/zoo")):
        (entry,) = index.parse(files["zoo_index.json"], "the index").entries
        assert (entry.model, entry.model_revision) == ("someone/model", row["revision"])
    assert not runner.hf.leaks
    assert plan(runner, only="someone/else") == {"matrix": '{"include": []}', "any": "false"}
