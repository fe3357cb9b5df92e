"""A release: only what was built once and tested is published, under the version that the tag
names."""

import json
import os
import subprocess

import pytest
import yaml
from check_release import release_problem
from support.places import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
JOBS = WORKFLOW["jobs"]
CHANGELOG = "# Changelog\n\n## [0.2.0] - 2026-11-30\n\n### Added\n\n## [0.1.0] - unreleased\n"


def test_a_tag_of_the_newest_version_with_a_date_is_released():
    assert release_problem("v0.2.0", "0.2.0", CHANGELOG) is None


@pytest.mark.parametrize(
    ("tag", "version", "problem"),
    [
        ("v0.2.1", "0.2.0", "the tag is v0.2.1"),
        ("0.2.0", "0.2.0", "the tag is 0.2.0"),
        ("v0.3.0", "0.3.0", "no heading for 0.3.0"),
        ("v0.1.0", "0.1.0", "as 'unreleased', and not with a date"),
    ],
)
def test_a_tag_that_says_something_else_is_refused(tag, version, problem):
    assert problem in release_problem(tag, version, CHANGELOG)


def test_an_older_version_is_not_released_again():
    dated = CHANGELOG.replace("unreleased", "2026-10-01")
    assert "not the newest" in release_problem("v0.1.0", "0.1.0", dated)


def test_the_changelog_begins_with_the_version_of_the_package():
    from rotationzoo import __version__

    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    problem = release_problem(f"v{__version__}", __version__, changelog)
    assert problem is None or "not with a date" in problem


def test_only_the_publisher_may_publish_and_it_runs_no_code_of_the_checkout():
    assert yaml.safe_load(json.dumps(WORKFLOW[True])) == {
        "push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}
    }
    assert "secrets." not in json.dumps(WORKFLOW)
    for name in ("build", "test"):
        assert not {"permissions", "environment"} & JOBS[name].keys()
    publisher = JOBS["publish"]
    assert publisher["environment"] == "pypi"
    assert publisher["permissions"] == {
        "contents": "read", "id-token": "write", "attestations": "write"
    }  # fmt: skip
    kinds = [step.get("uses", "run").partition("@")[0] for step in publisher["steps"]]
    assert kinds == [
        "actions/download-artifact",
        "run",
        "actions/attest-build-provenance",
        "pypa/gh-action-pypi-publish",
    ]


def scripts(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_what_is_tested_and_what_is_published_is_what_was_built():
    assert set(JOBS["publish"]["needs"]) == {"build", "test"}
    (compare,) = scripts("publish")
    assert scripts("test")[0] == compare
    build, add_up = scripts("build")[-2:]
    assert build.endswith("python scripts/tools/build_package.py dist")
    assert add_up.startswith("sha256sum dist/*")


def shell(script: str, folder, **variables: str) -> int:
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
    ).returncode


CHANGES = ["nothing", "a file", "a file and its sum", "no file is left", "one more", "a link more"]


@pytest.mark.parametrize("changes", CHANGES)
def test_what_was_changed_on_its_way_is_not_published(tmp_path, changes):
    wheel, told = tmp_path / "dist" / "rotationzoo.whl", tmp_path / "told"
    wheel.parent.mkdir()
    wheel.write_text("as it was built")
    (compare,), add_up = scripts("publish"), scripts("build")[-1]
    assert shell(add_up, tmp_path, GITHUB_OUTPUT=str(told)) == 0
    sums = told.read_text().strip().removeprefix("sums=")
    if changes == "one more":
        wheel.with_name("evil.whl").write_text("which nobody built")
    elif changes == "a link more":
        wheel.with_name("evil").symlink_to("/etc")
    elif changes != "nothing":
        wheel.write_text("as it arrived")
    if changes == "a file and its sum":
        shell(add_up, tmp_path, GITHUB_OUTPUT=str(told))
    if changes == "no file is left":
        wheel.unlink()
    assert (shell(compare, tmp_path, SUMS=sums) == 0) == (changes == "nothing")
