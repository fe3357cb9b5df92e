"""Every command and every example that the documentation shows is run as it is printed, page by
page, and the options that it names exist."""

import re
import sys

import pytest
from documented.pages import (
    PAGES,
    SHELL,
    blocks_of,
    check_options,
    commands_in,
    lone_options,
    name_of,
    options_of,
    script_of,
    spans_of,
    understand,
)
from documented.world import World, small_world
from support.places import ROOT

from rotationzoo.cli.app import COMMANDS

# How a command begins -> why it is not run here.
NOT_RUN = {
    "pip install": "it asks the package index",
    "pip uninstall": "it changes the environment",
    "rotationzoo serve": "it starts a server; tests/vllm/test_vllm.py runs a real vLLM",
    "rotationzoo verify rotations/Qwen3-8B-oscar --server": "it asks a running server",
    "rotationzoo validate": "it needs an NVIDIA GPU; tests/test_gpu.py runs it on one",
    "rotationzoo calibrate meta-llama/Llama-3.3-70B-Instruct --device-map auto --max-memory 0=": (
        "it gives a GPU's memory, and is refused where there is none"
    ),
    "rotationzoo calibrate Qwen/Qwen3-8B --keep": (
        "the small model in its place can do no task, so nothing shows what is kept"
    ),
    "rotationzoo calibrate demo --keep": (
        "it asks questions for minutes; tests/cli/test_calibrate.py asks a quicker model"
    ),
    "rotationzoo calibrate Qwen/Qwen3-VL-8B-Instruct --data photos.jsonl --images": (
        "its processor needs torchvision; tests/calibration/test_media_job.py runs another"
    ),
    "rotationzoo pull Qwen/Qwen3-8B --repo my-org/rotationzoo --require-signature --signer": (
        "only GitHub signs as one of its workflows; tests/zoo/signing has a local Sigstore"
    ),
    "python -m http.server": "it serves until it is stopped; tests/zoo/hubs has such a server",
    "curl": "it asks that server",
    "export HF_ENDPOINT": "it names that server",
    "python -m sglang.launch_server": "it starts a server on a GPU",
    "python3 -m venv": "tests of the wheel make environments",
    ". .venv/bin/activate": "the same",
    "vllm serve": "it starts a server on a GPU",
    "llama-server": "it starts a server of a fork",
    ".venv/bin/pre-commit install": "it changes the repository's hooks",
}
# Options of scripts and of other programs, which the text names beside ours.
OF_OTHERS = {
    "--additional-config", "--attention-backend", "--attention-config", "--enable-lora",
    "--enable-sleep-mode", "--hf-config-path", "--hf-overrides", "--kv-bits", "--kv-cache-dtype",
    "--kv-cache-dtype-skip-layers", "--kv-mean-center", "--kv-offloading-size",
    "--kv-transfer-config", "--load-format",
    "--mamba-radix-cache-strategy", "--max-num-seqs", "--prefix-match-unit",
    "--quantization", "--quantized-kv-start", "--speculative-config", "--tokenizer",
    "--weight-transfer-config", "--worker-cls", "--write-docs",
}  # fmt: skip
TEXTS = {page: page.read_text("utf-8") for page in PAGES}
WITH_COMMANDS = [page for page, text in TEXTS.items() if script_of(text, NOT_RUN).strip()]
WORKFLOWS = [ROOT / "docs" / "fleet.yml", *sorted((ROOT / ".github/workflows").glob("*.yml"))]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="forks a process with threads")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with small_world(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.mark.thorough
@on_linux
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_the_commands_of_a_page(page, world: World, tmp_path):
    script = script_of(TEXTS[page], NOT_RUN)
    # A page that calibrates nothing goes on with rotations that were made before.
    lines = re.findall(r"^[^#\n]*\brotationzoo calibrate .*", script, re.MULTILINE)
    calibrates = any(not line.startswith(tuple(NOT_RUN)) for line in lines)
    result = world.run(script, world.page(tmp_path / "page", goes_on=not calibrates), NOT_RUN)
    assert result.returncode == 0, f"{name_of(page)}\n{result.stdout}\n{result.stderr}"
    assert "FutureWarning" not in result.stderr


@pytest.mark.thorough
@on_linux
def test_the_commands_of_a_model_card(world: World, tmp_path):
    folder = world.page(tmp_path / "page", goes_on=True)
    card = (folder / "rotations/Qwen3-8B-oscar/README.md").read_text("utf-8")
    (folder / "rotations/Qwen3-8B-oscar").rename(folder / "FOLDER")
    (folder / "rotations.safetensors").symlink_to("FOLDER/rotations.safetensors")  # for the Python
    # "Save the recipe below as recipe.yaml first."
    (recipe,) = (block for block in blocks_of(card) if block.language == "yaml")
    (folder / "recipe.yaml").write_text("\n".join(recipe.lines))
    script = script_of(card, NOT_RUN)
    assert "rotationzoo " in script
    result = world.run(script, folder, NOT_RUN)
    assert result.returncode == 0, f"{card}\n{result.stdout}\n{result.stderr}"
    again = folder / "rotations/Qwen3-8B-oscar/rotations.safetensors"
    assert again.read_bytes() == (folder / "FOLDER/rotations.safetensors").read_bytes()


def test_what_is_not_run_is_still_shown():
    shown = "\n".join(re.sub(r"\s*\\\n\s*", " ", text) for text in TEXTS.values())
    assert not [command for command in NOT_RUN if command not in shown]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_of_commands_say_that_they_are(page):
    """Otherwise they would not be run."""
    for block in blocks_of(TEXTS[page]):
        if block.language not in SHELL:
            for line in block.lines:
                usage = block.language == "text" and "[OPTIONS]" in line
                assert usage or not line.startswith("rotationzoo ")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_text_have_these_options(page):
    for span in spans_of(TEXTS[page]):
        check_options(span)


def test_options_in_the_text_exist():
    named = set().union(*map(lone_options, TEXTS.values()))
    assert named - options_of(*COMMANDS) == OF_OTHERS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_not_run_are_understood(page):
    for block in blocks_of(TEXTS[page]):
        if block.language in SHELL:
            for words in commands_in("\n".join(block.lines)):
                understand(words)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name_of)
def test_commands_of_workflows_are_understood(workflow):
    for words in commands_in(workflow.read_text("utf-8")):
        understand(words)


def test_a_wrong_option_is_noticed():
    for line in ("rotationzoo pull Q/Q --nowhere", "rotationzoo plan", "rotationzoo nothing"):
        with pytest.raises(Exception, match=r"No such|Missing"):
            understand(next(commands_in(line)))
    for span in ("calibrate --nothing", "rotationzoo evaluate --sides"):
        with pytest.raises(AssertionError, match=r"no option --(nothing|sides)"):
            check_options(span)
