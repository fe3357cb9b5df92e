"""A real vLLM in its own environment, and what stands in for one that is not installed."""

import json
import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rotationzoo.codec.settings import CacheSettings
from rotationzoo.geometry import full_attention_layers, shares_blocks
from rotationzoo.model.loading import load_config
from rotationzoo.model.source import DEMO, find
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.vllm import command, plugin, refusals, settings
from support.places import ROOT

PYTHON = Path(os.environ.get("ROTATIONZOO_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make vllm"),
]
CHUNK, TOKENS = 256, 24
NGRAMS = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TEXT = "".join(json.loads(line)["text"] for line in HELD_OUT.read_text("utf-8").splitlines()[1:4])
"""What engines read: a fixed text, because each text has other codes that are close to a half."""
ON_GPU: dict[str, Any] = {}  # options of an engine there
if torch.cuda.is_available():  # which several engines share
    ON_GPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}


def server_settings(model: Path | str, artifact: Path, **options: Any) -> CacheSettings:
    """What a server of a model makes of an artifact."""
    source = find(str(model))
    has_others = shares_blocks(load_config(source))
    asked = settings.Options(artifact=str(artifact), **options)
    return settings.make_settings(asked, source.name, source.folder, has_others)


def serve(folder: Path, artifact: Path | None, rounds, tokens=TOKENS, variables=None, **options):
    """What an engine answers, or a broken one; `RuntimeError` with its output where it fails."""
    return drive(folder, engine_job(artifact, rounds, tokens, **options), **(variables or {}))


def serve_in_turn(folder: Path, jobs: list[dict]) -> list[dict]:
    """What several engines answer, one after another in one process, which starts faster."""
    return drive(folder, {"engines": jobs}, VLLM_ENABLE_V1_MULTIPROCESSING="0")


JOB = {"prompts_too", "sampling", "handed", "broken", "late", "planned"}
"""Options of a job that are not its engine's."""


def engine_job(artifact: Path | None, rounds, tokens=TOKENS, **options) -> dict:
    """A job of `vllm_driver.py`."""
    job = {name: options.pop(name) for name in JOB & options.keys()}
    engine = {
        "model": str(DEMO),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 8,
        "enforce_eager": True,
        **ON_GPU,
    }
    if artifact is not None:
        engine["additional_config"] = {"rotationzoo": {"artifact": str(artifact)}}
        if torch.cuda.is_available():  # where vLLM asks which layers are ours
            has_windows = full_attention_layers(load_config(find(options.get("model", str(DEMO)))))
            kinds = {"backend_per_kind": {"full_attention": "CUSTOM"}}
            engine["attention_config"] = kinds if has_windows else {"backend": "CUSTOM"}
    return {"engine": engine | options, "rounds": rounds, "tokens": tokens, **job}


def drive(folder: Path, job: dict, **variables: str):
    """The result of `vllm_driver.py` with these variables; `ALSO`: a folder to import from."""
    words, variables = _driver(folder, job, variables)
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads((folder / "result.json").read_text())


@contextmanager
def hold(folder: Path, job: dict, **variables: str):
    """The result of `vllm_driver.py`, whose engine stays until the block ends."""
    words, variables = _driver(folder, {**job, "held": True}, variables)
    log = folder / "log"
    with log.open("w") as output:
        options = {"cwd": folder, "env": variables, "stdout": output, "stderr": output}
        process = subprocess.Popen(words, stdin=subprocess.PIPE, **options)
    try:
        for _ in range(600):
            if process.poll() is not None or (folder / "result.json").exists():
                break
            time.sleep(1)
        assert process.poll() is None, log.read_text()
        yield json.loads((folder / "result.json").read_text())
    finally:
        process.communicate(timeout=60)


def _driver(folder: Path, job: dict, variables: dict[str, str]) -> tuple[list, dict[str, str]]:
    """The words and the environment of a driver."""
    (folder / "job.json").write_text(json.dumps(job))
    words = [PYTHON, ROOT / "tests/vllm/vllm_driver.py", "job.json", "result.json"]
    variables = {**environment(), **variables}
    variables["PYTHONPATH"] += f":{variables.pop('ALSO', ROOT)}"
    return words, variables


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
    }


def pretend(monkeypatch, package=plugin.GPU_PACKAGE) -> None:
    """Let commands find a vLLM that takes any options, and starts nothing."""
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(plugin, "find_installed", lambda: (package, plugin.TESTED[package][-1]))
    monkeypatch.setattr(command, "read_command", _read_command)
    monkeypatch.setattr(command, "read_options", lambda words, more: None)
    monkeypatch.setattr(refusals, "check_server", lambda settings, config: None)


def _read_command(words: list[str], more: list[str]) -> SimpleNamespace:
    model = words[words.index("--model" if "--model" in words else "serve") + 1]
    named = words[words.index("--additional-config") + 1]
    return SimpleNamespace(
        additional_config=json.loads(named),
        lora_config=None,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(kv_offloading_size=None),
        speculative_config=None,
        compilation_config=SimpleNamespace(custom_ops=[]),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
        model_config=SimpleNamespace(
            quantization=None,
            model=model,
            revision=None,
            dtype=torch.bfloat16,
            hf_config=load_config(find(model)),
        ),
    )
