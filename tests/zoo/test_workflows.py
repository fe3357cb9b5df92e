"""Workflows, beyond a linter: credentials, installations by hash, and checksums of builds."""

import json
import os
import subprocess

import pytest
import yaml
from support.cases import quick_first
from support.places import ROOT

# Workflow -> the environment of its publisher, the job with the checksums, and one of its files.
PUBLISHERS = {
    "regenerate": ("hub-release", "check", "out/model/manifest.json"),
    "mirror": ("modelscope-release", "fetch", "out/model/manifest.json"),
    "release": ("pypi", "build", "dist/rotationzoo.whl"),
}
CHANGES = ["a file", "a file and its sum", "no file is left", "one more", "a link more"]


def jobs(name: str) -> dict[str, dict]:
    path = ROOT / ".github" / "workflows" / f"{name}.yml"
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("name", PUBLISHERS)
def test_only_the_publisher_holds_credentials(name):
    for job, content in jobs(name).items():
        if job == "publish":
            assert content["environment"] == PUBLISHERS[name][0]
        else:
            assert "secrets." not in json.dumps(content)
            assert not {"permissions", "environment"} & content.keys(), job


@pytest.mark.parametrize("name", PUBLISHERS)
def test_everything_is_installed_by_its_hash(name):
    steps = [step for content in jobs(name).values() for step in content["steps"]]
    lines = "\n".join(step.get("run", "") for step in steps).splitlines()
    installs = [line for line in lines if "pip " in line]
    assert installs
    for line in installs:
        by_hash = "--require-hashes" in line and "--only-binary :all:" in line
        assert by_hash or ("--no-deps" in line and "--no-index" in line), line


def scripts(name: str, job: str) -> list[str]:
    """The scripts of a job without installations, and with a file instead of the wheel."""
    runs = [step.get("run", "") for step in jobs(name)[job]["steps"]]
    wheel = "mkdir -p wheel && echo wheel > wheel/rotationzoo.whl #"
    return [run.replace("pip wheel", wheel) for run in runs if run and "pip install" not in run]


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("name", quick_first(PUBLISHERS))
@pytest.mark.parametrize("changes", CHANGES)
def test_what_was_changed_on_its_way_to_the_publisher_is_not_published(tmp_path, name, changes):
    def succeeds(script: str, **variables: str) -> bool:
        words, environment = ["bash", "-e", "-o", "pipefail", "-c", script], os.environ | variables
        return subprocess.run(words, cwd=tmp_path, env=environment).returncode == 0

    _, job, path = PUBLISHERS[name]
    built, output = tmp_path / path, tmp_path / "github-output"
    built.parent.mkdir(parents=True)
    built.write_text("as it was built")
    add_up, compare = scripts(name, job)[-1], scripts(name, "publish")[0]
    assert succeeds(add_up, GITHUB_OUTPUT=str(output))
    sums = output.read_text().strip().removeprefix("sums=")
    assert succeeds(compare, SUMS=sums)
    if changes == "one more":
        built.with_name("evil").write_text("which nobody built")
    elif changes == "a link more":
        built.with_name("evil").symlink_to("/etc")
    else:
        built.write_text("as it arrived")
    if changes == "a file and its sum":
        assert succeeds(add_up, GITHUB_OUTPUT=str(output))
    if changes == "no file is left":
        built.unlink()
    assert not succeeds(compare, SUMS=sums)
