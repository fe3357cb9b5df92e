"""The names of vLLM that we use, versions that lack some, and what a worker loads of ours."""

import ast
import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from support.places import ROOT
from support.vllm import NEEDS_VLLM, PYTHON, environment

from rotationzoo.vllm import plugin, upstream

FILES = sorted((ROOT / "rotationzoo").rglob("*.py"))
CHECK = """
from rotationzoo.vllm import upstream
print("all:", *upstream.missing_names())
from vllm.v1.attention import backend
del backend.MultipleOf, backend.AttentionBackend.customize_spec
print("but:", *upstream.missing_names())
"""


def imports_of(file) -> list[tuple[str, str]]:
    """The modules that a file imports from, at its top or later, with each name."""
    nodes = [*ast.walk(ast.parse(file.read_text("utf-8")))]
    froms = [(each.module, each) for each in nodes if isinstance(each, ast.ImportFrom)]
    found = [(module or "", alias.name) for module, node in froms for alias in node.names]
    plain = [node for node in nodes if isinstance(node, ast.Import)]
    return found + [(alias.name, "") for node in plain for alias in node.names]


def test_one_file_alone_imports_vllm_and_has_no_name_that_nothing_uses():
    taken = set()
    for file in FILES:
        modules = imports_of(file)
        assert not [name for name, _ in modules if name.partition(".")[0] == "vllm"], file
        taken |= {name for module, name in modules if module == "rotationzoo.vllm.upstream"}
        if ("rotationzoo.vllm", "upstream") in modules:
            nodes = ast.walk(ast.parse(file.read_text("utf-8")))
            taken |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    table = upstream.NAMES | upstream.ON_CPU | upstream.ON_GPU
    names = {name for of_module in table.values() for name in of_module.split()}
    assert names - taken == {"CPUWorker", "Worker", "entry", "main"}, "which paths name"
    assert set(upstream.MEMBERS) <= names


@pytest.fixture
def fake(monkeypatch):
    """Modules that have all names and members of the table, for a CPU."""
    table = upstream.NAMES | upstream.ON_CPU
    for path, names in table.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules or end == len(parts):
                module = ModuleType(name)
                module.__path__, module.__spec__ = [], SimpleNamespace(name=name)
                monkeypatch.setitem(sys.modules, name, module)
        for each in names.split():
            members = dict.fromkeys(upstream.MEMBERS.get(each, "").split(), lambda: True)
            setattr(sys.modules[path], each, SimpleNamespace(**members))
    monkeypatch.setattr(plugin, "find_installed", lambda: (plugin.CPU_PACKAGE, "9.9.9"))
    return sys.modules


def test_versions_that_lack_a_name_need_anyway_and_older_ones_are_refused(fake, monkeypatch):
    assert upstream.missing_names() == []
    assert plugin.choose_package() == (plugin.CPU_PACKAGE, None)
    path = "vllm.v1.attention.backend"
    del fake[path].MultipleOf
    del fake[path].AttentionImpl.forward
    missing = [f"{path}.AttentionImpl.forward", f"{path}.MultipleOf"]
    assert upstream.missing_names() == missing
    package, error = plugin.choose_package()
    assert package == plugin.CPU_PACKAGE
    assert str(error).endswith(f"0.32.0: it lacks {', '.join(missing)} (--anyway tries it)")
    assert plugin.choose_package(anyway=True) == (plugin.CPU_PACKAGE, None)
    with pytest.raises(ImportError, match=f"vLLM has no {path}.MultipleOf"):
        from rotationzoo.vllm.upstream import MultipleOf  # noqa: F401
    del fake["vllm.v1.kv_cache_interface"]
    assert "and 2 more (--anyway" in str(plugin.choose_package()[1])
    monkeypatch.setattr(plugin, "find_installed", lambda: (plugin.CPU_PACKAGE, "0.31.0"))
    assert str(plugin.choose_package(anyway=True)[1]).endswith("was only tested with 0.32.0")


@NEEDS_VLLM[0]
@NEEDS_VLLM[1]
def test_the_installed_version_has_every_name_and_those_that_go_are_named():
    words = [PYTHON, "-c", CHECK]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    path = "vllm.v1.attention.backend"
    gone = f"{path}.AttentionBackend.customize_spec {path}.MultipleOf"
    assert done.stdout.splitlines()[-2:] == ["all:", f"but: {gone}"]


# ---- what a worker loads: the codec and the reader of artifacts


UNWANTED = ["datasets", "modelscope", "huggingface_hub", "transformers", "altair", "typer", "rich"]
WORKER = ["backend", "flash_attention", "metrics"]
"""These import vLLM and what it brings along, which need not be there."""
COUNT = f"""
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = [name for name in sys.modules if name.partition(".")[0] == "rotationzoo"]
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


def ours_of(name: str) -> list[str]:
    """The modules of this package that a module of a worker imports from at its top."""
    body = ast.parse((ROOT / f"rotationzoo/vllm/{name}.py").read_text("utf-8")).body
    froms = [node.module for node in body if isinstance(node, ast.ImportFrom)]
    return sorted({name for name in froms if name and name.startswith("rotationzoo")})


def test_a_worker_loads_the_codec_and_the_reader_of_artifacts_alone_and_can_be_forked():
    """vLLM's `LLM` forks its engine on a GPU, and a child waits for threads that its parent had."""
    ours = {name for module in WORKER for name in ours_of(module)}
    ours -= {f"rotationzoo.vllm.{name}" for name in WORKER}
    assert "rotationzoo.vllm.pages" in ours
    words = [sys.executable, "-c", COUNT + FORK, *sorted(ours)]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60)
    loaded, unwanted = json.loads(done.stdout.splitlines()[-1])
    assert unwanted == []
    rooms = {name.split(".")[1] for name in loaded if "." in name}
    assert not rooms & {"model", "evaluation", "calibration", "zoo", "engines", "report", "network"}
