import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from published import made, zoo  # noqa: F401

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing in this process may look for a hub; subprocesses get one of their own
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes of several threads each would wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

DATA = Path(__file__).parents[1] / "rotationzoo" / "data" / "demo"


def save_tiny(folder: Path, **changes) -> Path:
    """A random Qwen3 of two layers with the demo model's tokenizer, as save_pretrained writes it."""
    torch.manual_seed(0)
    options = dict(
        vocab_size=2048, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**options, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "model" / name, folder)
    return folder


def save_family(name: str, folder: Path, weights: bool = True, **options) -> Path:
    """A tiny model of one of the families in `architectures.py` with the demo model's tokenizer, or its config alone."""
    import architectures

    changes = dict(vocab_size=2048, max_position_embeddings=2048, bos_token_id=None, eos_token_id=0, **options)
    if weights:
        architectures.build(name, **changes).save_pretrained(folder)
    else:
        config = architectures.config(name, **changes)
        with torch.device("meta"):
            config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
        config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "model" / file, folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def command(tmp_path):
    """Run the real command line in a process of its own, in an empty folder, with no hub in reach."""
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there
        "COLUMNS": "120",
        "CUDA_VISIBLE_DEVICES": "",  # the same everywhere; test_gpu.py is for GPUs
    }
    environment.pop("HF_HUB_OFFLINE")
    work = tmp_path / "work"
    work.mkdir()

    def run(*words, env=None, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "rotationzoo", *map(str, words)],
            cwd=work, env={**environment, **(env or {})}, capture_output=True, text=True, timeout=300, **options,
        )  # fmt: skip

    run.folder, run.environment = work, environment
    return run


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """The same command line in this process, which saves the seconds that importing torch takes."""
    from typer.testing import CliRunner

    from rotationzoo.cli import app

    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def run(*words) -> SimpleNamespace:
        result = CliRunner().invoke(app, [*map(str, words)])
        return SimpleNamespace(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    run.folder = work
    return run
