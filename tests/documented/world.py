"""The world of the pages: hubs that hold small models under the names that pages use, and a folder
with the files that pages assume."""

import copy
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from support import process_server
from support.engine_readers import convert_model
from support.hubs import huggingface, modelscope
from support.models import save_family, save_tiny, write_jsonl
from support.places import ROOT
from support.published import hub_environment, publish_folder

from rotationzoo.text.documents import BUNDLED, HELD_OUT

PROGRAMS = ("rotationzoo", "python")
IMPORTED = (
    *process_server.IMPORTED, "accelerate", "datasets", "modelscope", "rotationzoo.cli.app",
    "rotationzoo.calibration.calibrate", "rotationzoo.engines.export",
    "rotationzoo.evaluation.evaluate", "rotationzoo.generation.generate",
    "rotationzoo.zoo.regenerate", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip
NAMED = ["Qwen/Qwen3-8B", "Qwen/Qwen3-4B"]  # beside the models of configs/
WITH_LATENTS = "deepseek-ai/DeepSeek-V2-Lite"
SIZES = dict(
    hidden_size=64, head_dim=64, max_position_embeddings=40960,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
TEXTS = [json.loads(line)["text"] for line in BUNDLED.read_text("utf-8").splitlines()[:40]]
CHATS = [
    [{"role": "user", "content": text[:400]}, {"role": "assistant", "content": text[400:]}]
    for text in TEXTS
]
CHAT_LINES = [{"messages": chat} for chat in CHATS]
DATA_SETS = {  # name -> configuration, splits, lines
    "open-r1/Mixture-of-Thoughts": ("all", ["train"], CHAT_LINES),
    "HuggingFaceH4/ultrachat_200k": ("default", ["train_sft"], CHAT_LINES),
}
# What others have published, and the folders and files that pages assume as made.
BEFORE = """
rotationzoo calibrate demo --recipe oscar-v1
mv rotations assumed
rotationzoo calibrate demo
rotationzoo calibrate Qwen/Qwen3-8B --recipe configs/Qwen3-8B.yaml
rotationzoo calibrate deepseek-ai/DeepSeek-V2-Lite
rotationzoo push rotations/Qwen3-8B-oscar rotationzoo/zoo --to both
rotationzoo push rotations/Qwen3-8B-oscar my-org/rotationzoo --to both
rotationzoo calibrate my-model -o ROTATIONS
rotationzoo calibrate Qwen/Qwen3-4B-Thinking-2507 -o thinking
rotationzoo export thinking --to vllm-oscar --pooled --windows 0/0 -o vllm
mv vllm/*.pt .
rm -r thinking vllm
ln -s my-model MODEL
"""


# With `extdebug`, bash skips a command for which the trap fails. All is one line, because the lines
# of a script are those of its page.
START = (
    "is_not_run() { local entry command=$BASH_COMMAND; "
    "while [[ $command =~ ^[A-Z_]+=[^\\ ]*\\ (.*) ]]; do command=${BASH_REMATCH[1]}; done; "
    'for entry in "${NOT_RUN[@]}"; do [[ $command == "$entry"* ]] && return; done; false; }; '
    "shopt -s extdebug; trap '! is_not_run' DEBUG; "
    "trap 'echo \"Line $LINENO fails: $BASH_COMMAND\" >&2' ERR; "
)


class World:
    """Runs the scripts of pages."""

    def __init__(self, folder: Path, hf: huggingface.HuggingFaceHub, ms: modelscope.ModelScopeHub):
        self.folder, self.hf, self.ms = folder, hf, ms
        self.bin, self.files = folder / "bin", folder / "files"
        self.environment = hub_environment(hf, ms, folder) | {
            "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1", "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip

    def put_programs(self, words: list[str]) -> None:
        """Programs of these names go before those of the machine."""
        start = shlex.join(words)
        programs = {name: f'{start} {name} "$@"' for name in PROGRAMS}
        # The targets take long; that they exist, and what they would run, is known at once.
        programs["make"] = f'{shutil.which("make")} -n -C {ROOT} "$@"'
        self.bin.mkdir()
        for name, content in programs.items():
            (self.bin / name).write_text(f"#!/bin/sh\nexec {content}\n")
            (self.bin / name).chmod(0o755)

    def serve_models(self) -> None:
        model = save_tiny(self.files / "my-model", **SIZES)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        configs = sorted((ROOT / "configs").iterdir())
        configured = [yaml.safe_load(path.read_text("utf-8"))["model"] for path in configs]
        latents = save_family("deepseek_v2", self.folder / "latents")
        for name in dict.fromkeys([*NAMED, *configured, WITH_LATENTS]):
            publish_folder(self.hf, name, latents if name == WITH_LATENTS else model)

    def serve_data_sets(self) -> None:
        for name, (subset, splits, lines) in DATA_SETS.items():
            files = [{"split": split, "path": "lines.jsonl"} for split in splits]
            card = yaml.safe_dump({"configs": [{"config_name": subset, "data_files": files}]})
            folder = self.folder / name
            folder.mkdir(parents=True)
            write_jsonl(folder / "lines.jsonl", lines)
            (folder / "README.md").write_text(f"---\n{card}---\n")
            publish_folder(self.hf, f"datasets/{name}", folder)

    def write_files(self) -> None:
        """The files of the user that pages name."""
        write_jsonl(self.files / "my-texts.jsonl", [{"text": text} for text in TEXTS])
        write_jsonl(self.files / "sessions.jsonl", CHAT_LINES)
        shutil.copy(HELD_OUT, self.files / "held-out.jsonl")
        (self.files / "long.txt").write_text(TEXTS[0][:4000])
        convert_model(self.files / "my-model", self.files / "Qwen3-8B-Q8_0.gguf")
        (self.files / "requests").mkdir()
        shutil.copy(ROOT / "configs" / "Qwen3-8B.yaml", self.files / "requests")
        for name in ("configs", "scripts"):
            (self.files / name).symlink_to(ROOT / name)

    def begin(self) -> None:
        result = self.run(BEFORE, self.files)
        assert result.returncode == 0, result.stderr
        (self.files / "rotations").rename(self.folder / "made")
        (self.files / "assumed").rename(self.files / "rotations")
        self.published = {hub: copy.deepcopy(hub.repositories) for hub in (self.hf, self.ms)}

    def page(self, folder: Path, goes_on: bool) -> Path:
        """A new folder of a user, beside hubs that are as they were in the beginning. `goes_on`:
        with the rotations that the README makes."""
        shutil.copytree(self.files, folder, symlinks=True)
        if goes_on:
            shutil.copytree(self.folder / "made", folder / "rotations", dirs_exist_ok=True)
        for hub, repositories in self.published.items():
            hub.repositories = copy.deepcopy(repositories)
        for cache in ("hf/assets", "ms-home", "ms-cache"):
            shutil.rmtree(self.folder / cache, ignore_errors=True)
        return folder

    def run(
        self, script: str, folder: Path, not_run: Iterable[str] = ()
    ) -> subprocess.CompletedProcess:
        """Run a script with bash, which ends at the first command that fails and says its line.
        Commands that begin as an entry of `not_run` does are skipped."""
        start = f"NOT_RUN=({shlex.join(not_run)}); {START}"
        path = {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.run(
            ["bash", "-e", "-E", "-o", "pipefail", "-c", start + script],
            cwd=folder,
            env=os.environ | self.environment | path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
        )


@contextmanager
def small_world(folder: Path) -> Iterator[World]:
    """Inside the block hubs and programs run."""
    with huggingface.serve() as hf, modelscope.serve() as ms:
        world = World(folder, hf, ms)
        world.files.mkdir()
        world.serve_models()
        world.serve_data_sets()
        world.write_files()
        (folder / "server").mkdir()
        served = process_server.server(
            folder / "server",
            IMPORTED,
            os.environ | world.environment,
            str(Path(__file__).with_name("programs.py")),
        )
        with served as words:
            world.put_programs(words)
            world.begin()
            yield world
            assert not hf.leaks, "a token reached another host"
            assert not ms.leaks
