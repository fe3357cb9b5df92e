"""What a worker of vLLM loads of this package: the codec and the reader of artifacts."""

import ast
import json
import subprocess
import sys

from support.places import ROOT
from support.vllm import NEEDS_VLLM, PYTHON, environment

MODULES, LINES = 45, 6000
"""42 modules with 5,976 lines are loaded today."""
UNWANTED = ["datasets", "modelscope", "huggingface_hub", "transformers", "altair", "typer", "rich"]
BACKEND = "rotationzoo.vllm.backend"
FILES = "rotationzoo/vllm/backend.py", "rotationzoo/vllm/flash_attention.py"
COUNT = f"""
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = {{name: module.__file__ for name, module in sys.modules.items()
          if name.partition(".")[0] == "rotationzoo"}}
print("LOADED", json.dumps([loaded, [name for name in {UNWANTED} if name in sys.modules]]))
"""


def count_lines(files) -> int:
    return sum(len((ROOT / file).read_text("utf-8").splitlines()) for file in files)


def load(python, modules, **options):
    words = [python, "-c", COUNT, *modules]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, **options)
    return json.loads(done.stdout.rpartition("LOADED")[2])


def ours_of(file) -> list[str]:
    """The modules of this package that a file imports from at its top."""
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    froms = [node.module for node in body if isinstance(node, ast.ImportFrom)]
    return sorted({name for name in froms if name and name.startswith("rotationzoo")})


def test_a_worker_loads_the_codec_and_the_reader_of_artifacts_alone():
    # Two modules import vLLM, which need not be there.
    ours = {*ours_of(FILES[0]), *ours_of(FILES[1])} - {"rotationzoo.vllm.flash_attention"}
    assert "rotationzoo.vllm.pages" in ours
    loaded, unwanted = load(sys.executable, sorted(ours))
    assert unwanted == []
    assert len(loaded) + len(FILES) <= MODULES
    assert count_lines([*loaded.values(), *FILES]) <= LINES
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert not rooms & {"model", "evaluation", "calibration", "zoo", "engines", "report", "network"}


@NEEDS_VLLM[0]
@NEEDS_VLLM[1]
def test_the_backend_itself_loads_no_more():
    loaded, _ = load(PYTHON, [BACKEND], env=environment())
    assert BACKEND in loaded
    assert len(loaded) <= MODULES
    assert count_lines(loaded.values()) <= LINES


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


def test_a_process_that_read_settings_can_be_forked():
    """vLLM's `LLM` forks its engine on a GPU, and a child waits for threads that its parent had."""
    subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, check=True, timeout=60)
