"""What a worker of vLLM loads of this package: the codec and the reader of artifacts."""

import ast
import json
import subprocess
import sys

from support.places import ROOT

MODULES, LINES = 46, 6350
"""46 modules with 6,304 lines are loaded today."""
UNWANTED = ["datasets", "modelscope", "huggingface_hub", "transformers", "altair", "typer", "rich"]
WORKER = ["backend", "flash_attention", "metrics"]
"""These import vLLM and what it brings along, which need not be there."""
FILES = [f"rotationzoo/vllm/{name}.py" for name in WORKER]
COUNT = f"""
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = {{name: module.__file__ for name, module in sys.modules.items()
          if name.partition(".")[0] == "rotationzoo"}}
print(json.dumps([loaded, [name for name in {UNWANTED} if name in sys.modules]]), flush=True)
"""


FORK = """
import os
from pathlib import Path
import torch
from rotationzoo.vllm import settings

def add(*words):
    torch.ones(10_000_000).add_(1)

torch.set_num_threads(2)
settings.make_settings = add
settings._settings_of('{"artifact": "any"}', "a model", Path(), False)
assert torch.get_num_threads() == 2
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    add()
    os._exit(0)
"""


def ours_of(file) -> list[str]:
    """The modules of this package that a file imports from at its top."""
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    froms = [node.module for node in body if isinstance(node, ast.ImportFrom)]
    return sorted({name for name in froms if name and name.startswith("rotationzoo")})


def test_a_worker_loads_the_codec_and_the_reader_of_artifacts_alone_and_can_be_forked():
    """vLLM's `LLM` forks its engine on a GPU, and a child waits for threads that its parent had."""
    ours = {name for file in FILES for name in ours_of(file)}
    ours -= {f"rotationzoo.vllm.{name}" for name in WORKER}
    assert "rotationzoo.vllm.pages" in ours
    words = [sys.executable, "-c", COUNT + FORK, *sorted(ours)]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60)
    loaded, unwanted = json.loads(done.stdout.splitlines()[-1])
    assert unwanted == []
    assert len(loaded) + len(FILES) <= MODULES
    texts = [(ROOT / file).read_text("utf-8") for file in (*loaded.values(), *FILES)]
    assert sum(len(text.splitlines()) for text in texts) <= LINES
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert not rooms & {"model", "evaluation", "calibration", "zoo", "engines", "report", "network"}
