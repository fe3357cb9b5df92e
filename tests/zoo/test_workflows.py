"""What a linter of workflows cannot see: who holds credentials, what is compared before it is
published, and that the commands do what they should."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from plan_matrix import smallest_runner
from support.cases import quick_first
from support.hubs import huggingface, modelscope
from support.places import ROOT
from support.published import CONFIG, change_weights, hub_environment, publish_folder

from rotationzoo.model.source import DEMO
from rotationzoo.zoo import index

FLEET = ROOT / "docs" / "fleet.yml"
FILES = [*sorted((ROOT / ".github" / "workflows").glob("*.yml")), FLEET]


def test_the_workflows_are_ones_that_github_takes():
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([sys.executable, *words, *FILES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def jobs(name: str) -> dict[str, dict]:
    (path,) = (path for path in FILES if path.stem == name)
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_a_job_needs_what_it_reads(name):
    """`needs.NAME` of a job that is not in `needs` is empty, and nothing says so."""
    for job, content in jobs(name).items():
        needed = content.get("needs", [])
        needed = [needed] if isinstance(needed, str) else needed
        assert set(re.findall(r"needs\.(\w+)", json.dumps(content))) <= set(needed), job


SIGNS = {"contents": "read", "id-token": "write"}
ATTESTS = {**SIGNS, "attestations": "write"}
# Workflow -> the environment and the permissions of the job that publishes.
PUBLISHERS = {
    "regenerate": ("hub-release", ATTESTS),
    "mirror": ("modelscope-release", SIGNS),
    "release": ("pypi", ATTESTS),
}


@pytest.mark.parametrize("name", PUBLISHERS)
def test_only_the_publisher_holds_credentials(name):
    for job, content in jobs(name).items():
        if job == "publish":
            continue
        assert "secrets." not in json.dumps(content)
        assert not {"permissions", "environment"} & content.keys(), job
    publisher = jobs(name)["publish"]
    assert (publisher["environment"], publisher["permissions"]) == PUBLISHERS[name]
    assert "self-hosted" not in json.dumps(publisher)


def kinds_of(job: dict) -> list[str]:
    """The actions and the scripts of a job, in order."""
    return [step.get("uses", step.get("run", "")).partition("@")[0] for step in job["steps"]]


def test_what_is_merged_and_signed_alone_goes_to_the_other_hub():
    assert "MODELSCOPE" not in json.dumps(jobs("regenerate"))
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "mirror.yml").read_text())
    assert "/.github/workflows/regenerate.yml@" in content["env"]["SIGNER"]


def test_a_release_follows_a_tag_and_its_publisher_runs_no_code_of_the_checkout():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}
    assert "secrets." not in json.dumps(workflow)
    publish = workflow["jobs"]["publish"]
    # What is tested and published is what was built.
    compare = scripts("release", "test")[0]
    assert kinds_of(publish) == [
        "actions/download-artifact",
        compare,
        "actions/attest-build-provenance",
        "pypa/gh-action-pypi-publish",
    ]
    assert set(publish["needs"]) == {"build", "test"}
    build, add_up = scripts("release", "build")[-2:]
    assert build.strip().endswith("--wheel-dir dist dist/*.tar.gz")
    assert add_up.startswith("sha256sum dist/*")


CHANGELOG = "# Changelog\n\n## [0.2.0] - DAY\n\n### Added\n\n## [0.1.0] - 2026-10-01\n"


@pytest.mark.parametrize(
    ("tag", "version", "day", "fails"),
    [
        ("v0.2.0", "0.2.0", "2026-11-30", False),
        ("v0.2.1", "0.2.0", "2026-11-30", True),
        ("v0.2.0", "0.2.0", "unreleased", True),
        ("v0.3.0", "0.3.0", "2026-11-30", True),
        ("v0.1.0", "0.1.0", "2026-11-30", True),
    ],
    ids=["newest", "another tag", "no date", "no heading", "not the newest"],
)
def test_only_the_newest_version_with_a_date_is_released(tmp_path, tag, version, day, fails):
    package = tmp_path / "rotationzoo"
    package.mkdir()
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG.replace("DAY", day))
    check = scripts("release", "build")[0]
    run_script(tmp_path, dict(os.environ), check, fails=fails, GITHUB_REF_NAME=tag)


def test_the_publisher_attests_what_was_checked():
    """After the hashes were compared, and before anything that was downloaded runs."""
    kinds = kinds_of(jobs("regenerate")["publish"])
    attest = kinds.index("actions/attest-build-provenance")
    assert "sha256sum --check" in kinds[attest - 1]
    assert "pip install" in kinds[attest + 1]
    step = jobs("regenerate")["publish"]["steps"][attest]
    assert step["with"] == {"subject-checksums": "SHA256SUMS"}


@pytest.mark.parametrize("name", PUBLISHERS)
def test_everything_is_installed_by_its_hash(name):
    for job, content in jobs(name).items():
        lines = [
            line.strip()
            for step in content["steps"]
            for line in step.get("run", "").splitlines()
            if "pip " in line
        ]
        assert lines or (name, job) == ("release", "publish"), "each job needs the package"
        for line in lines:
            by_hash = "--require-hashes" in line and "--only-binary :all:" in line
            nothing_else = "--no-deps" in line and "--no-index" in line
            assert by_hash or nothing_else, line


# Name -> the extras that it holds beside what the package needs.
LOCKS = {"requirements.txt": ("cuda", "report", "sign"), "requirements-dev.txt": ("dev",)}


@pytest.mark.parametrize("name", LOCKS)
def test_the_lock_holds_what_the_package_needs(name):
    """Every requirement in a version that it allows, with a hash. `make lock` makes it anew."""
    from packaging.requirements import Requirement

    lock = (ROOT / ".github" / name).read_text()
    rows = [line.split() for line in lock.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for _, digest in rows)
    locked = dict(pinned.split("==") for pinned, _ in rows)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    extra = [line for chosen in LOCKS[name] for line in extras[chosen]]
    for line in [*project["dependencies"], *extra]:
        wanted = Requirement(line)
        package = wanted.name.lower().replace("_", "-")
        assert wanted.specifier.contains(locked[package]), f"{package} {locked[package]}"


# In place of pip, whose part is tried in tests above.
WHEEL = "mkdir -p wheel && echo wheel > wheel/rotationzoo.whl"


@pytest.fixture
def runner(command, program, tmp_path):
    """The checkout of a workflow: the shell runs its lines with `rotationzoo` on the path, against
    loopback hubs."""
    with huggingface.serve() as hf, modelscope.serve() as ms:
        publish_folder(hf, "someone/model", DEMO)
        (command.folder / "configs").mkdir()
        (command.folder / "configs" / "model.yaml").write_text(CONFIG)
        (command.folder / "scripts").symlink_to(ROOT / "scripts")
        bin_folder = tmp_path / "bin"
        bin_folder.mkdir()
        python = f"exec {sys.executable}"
        commands = {
            # Whoever publishes or fetches trusts a local Sigstore, where the test has one.
            "rotationzoo": f'case "$1" in push|pull) set -- "$@" $TRUST;; esac\n'
            f'exec {shlex.join(program)} "$@"',
            "python": f'case "$1" in *fetch_signed.py) set -- "$@" $TRUST;; esac\n{python} "$@"',
            "pip": WHEEL,
        }
        for name, line in commands.items():
            (bin_folder / name).write_text(f"#!/bin/sh\n{line}\n")
            (bin_folder / name).chmod(0o755)
        environment = command.environment | hub_environment(hf, ms, tmp_path)
        environment |= {"ZOO": "someone/zoo", "TRUST": ""}
        environment["PATH"] = f"{bin_folder}:{environment['PATH']}"

        run = partial(run_script, command.folder, environment)
        output = tmp_path / "github-output"
        yield SimpleNamespace(run=run, hf=hf, ms=ms, folder=command.folder, output=output)


def run_script(folder: Path, environment: dict, script: str, fails=False, **variables: str) -> None:
    """Run a step as GitHub does, which fails if that is expected."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr


def scripts(name: str, job: str) -> list[str]:
    """What a job runs, but for what it installs."""
    return [
        step["run"]
        for step in jobs(name)[job]["steps"]
        if "run" in step and "pip install" not in step["run"]
    ]


def outputs(runner, name: str, job: str, **variables: str) -> dict:
    runner.output.write_text("")
    for script in scripts(name, job):
        runner.run(script, GITHUB_OUTPUT=str(runner.output), **variables)
    return dict(line.split("=", 1) for line in runner.output.read_text().splitlines())


def plan(runner, only: str = "") -> dict:
    return outputs(runner, "regenerate", "plan", ONLY=only)


def build(runner, row: dict) -> None:
    (script,) = scripts("regenerate", "build")
    # The runner of this test has no GPU.
    shorter = "--device cpu --tokens 1024 --length 256 --tasks none"
    assert "--device-map auto" in script
    variables = {name.upper(): value for name, value in row.items()}
    runner.run(script.replace("--device-map auto", shorter), **variables)
    # What the two actions do that hand a folder from one job to the other.
    built = runner.folder / "built"
    built.mkdir(exist_ok=True)
    (runner.folder / "out" / row["name"]).rename(built / f"rotations-{row['name']}")
    (runner.folder / "out").rmdir()


@pytest.mark.thorough
def test_what_is_reviewed_is_published_and_what_is_merged_is_mirrored(
    runner, sigstore, monkeypatch
):
    """What is published was attested, and is signed by one workflow; the other one copies it."""
    own = sigstore.WORKFLOW
    signing = {"TRUST": f"--trust-config {sigstore.trust}", **sigstore.job}
    change_weights(runner, "someone/model")
    runner.hf.create("someone/zoo")  # by hand: a trusted publisher cannot make one
    # A plan that is known in part goes on.
    unknown = CONFIG.replace("someone/model", "someone/gone")
    (runner.folder / "configs" / "gone.yaml").write_text(unknown)
    first = plan(runner)
    (row,) = json.loads(first["matrix"])["include"]
    assert (first["any"], row["model"], row["name"]) == ("true", "someone/model", "someone__model")
    build(runner, row)
    sums = outputs(runner, "regenerate", "check", MATRIX=first["matrix"])["sums"]
    compare, publish = scripts("regenerate", "publish")
    for entry in ("out/evil", "wheel/evil.whl"):
        (runner.folder / entry).symlink_to(runner.folder / "out" / row["name"])
        runner.run(compare, fails=True, SUMS=sums)
        (runner.folder / entry).unlink()
    shutil.copytree(runner.folder / "out" / row["name"], runner.folder / "out" / "evil")
    runner.run(compare, fails=True, SUMS=sums)
    shutil.rmtree(runner.folder / "out" / "evil")
    runner.run(compare, SUMS=sums)
    runner.run(publish, HF_OIDC_RESOURCE="", **signing)
    assert "zoo_index.json" not in runner.hf.files("someone/zoo"), "a pull request, and no commit"
    assert not runner.ms.repositories, "nobody has merged it yet"

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    api = huggingface_hub.HfApi(endpoint=runner.hf.endpoint, token=runner.hf.token)
    api.merge_pull_request("someone/zoo", 1)
    another = "rotationzoo calibrate someone/model --recipe hadamard --output another --quiet\n"
    another += 'rotationzoo push another "$ZOO" --sign keyless --published 2026-01-02'
    runner.run(another, **signing)
    shutil.rmtree(runner.folder / "out")
    sums = outputs(runner, "mirror", "fetch", TRUST=signing["TRUST"], SIGNER=own)["sums"]
    compare, mirror = scripts("mirror", "publish")
    runner.run(compare, SUMS=sums)
    sigstore.server.identity = own.replace("regenerate", "mirror")
    runner.run(mirror, MODELSCOPE_API_TOKEN="ms_test", **signing)
    listed = index.parse(runner.hf.files("someone/zoo")["zoo_index.json"], "the index").entries
    days = [("hadamard", "2026-01-02"), ("oscar", listed[1].created)]
    for files in (runner.hf.files("someone/zoo"), runner.ms.files("someone/zoo")):
        entries = index.parse(files["zoo_index.json"], "the index").entries
        assert [(entry.recipe, entry.created) for entry in entries] == days
        for entry in entries:
            assert (entry.model, entry.model_revision) == ("someone/model", row["revision"])
            assert entry.signer.identity == own
        assert "zoo_index.json.sig" in files
    assert not runner.hf.leaks
    assert plan(runner, only="someone/else") == {"matrix": '{"include": []}', "any": "false"}
    assert plan(runner)["any"] == "false", "it is published"


def test_the_fleet_of_the_documentation_builds_as_the_regeneration_does():
    (_,) = (step for step in jobs("fleet")["plan"]["steps"] if step.get("id") == "plan")
    (script,) = scripts("fleet", "build")
    assert [script.replace('"$OUT/$NAME"', '"out/$NAME"')] == scripts("regenerate", "build")
    assert jobs("fleet")["build"]["runs-on"][-1] == "${{ matrix.runner }}"
    assert not {"permissions", "secrets"} & jobs("fleet")["build"].keys()


def test_a_model_goes_to_the_smallest_runner_that_holds_it():
    room = {"small": 23_000_000_000, "large": 77_000_000_000, "two": 154_000_000_000}
    # Qwen3-8B, Qwen3-32B, Llama 3.3 70B (see docs/scale.md), and one that no runner holds.
    sizes = [16_380_854_272, 65_522_892_800, 141_104_775_168, 10**12]
    chosen = [smallest_runner(size, room) for size in sizes]
    assert chosen == ["small", "large", "two", "two"]
    assert smallest_runner(20_000_000_000, room) == "large", "beside its weights it needs room"


# Workflow -> the job that adds up the sums, and a file that it hands over.
SUMMED = {
    "regenerate": ("check", "out/model/manifest.json"),
    "mirror": ("fetch", "out/model/manifest.json"),
    "release": ("build", "dist/rotationzoo.whl"),
}
CHANGES = ["a file", "a file and its sum", "no file is left", "one more", "a link more"]


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("name", quick_first(SUMMED))
@pytest.mark.parametrize("changes", CHANGES)
def test_what_was_changed_on_its_way_to_the_publisher_is_not_published(tmp_path, name, changes):
    job, path = SUMMED[name]
    built = tmp_path / path
    built.parent.mkdir(parents=True)
    built.write_text("as it was built")
    output = tmp_path / "github-output"
    run = partial(run_script, tmp_path, os.environ | {"GITHUB_OUTPUT": str(output)})
    add_up = scripts(name, job)[-1].replace("pip wheel", f"{WHEEL} #")
    run(add_up)
    sums = output.read_text().strip().removeprefix("sums=")
    compare = scripts(name, "publish")[0]
    run(compare, SUMS=sums)
    if changes == "one more":
        built.with_name("evil").write_text("which nobody built")
    elif changes == "a link more":
        built.with_name("evil").symlink_to("/etc")
    else:
        built.write_text("as it arrived")
    if changes == "a file and its sum":
        run(add_up)
    if changes == "no file is left":
        built.unlink()
    run(compare, fails=True, SUMS=sums)
