"""The fixtures of all rooms. What one room needs stands in its own conftest.py."""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from rotationzoo.artifact.store import Artifact
from rotationzoo.model.source import DEMO
from support import process_server
from support.browser import Browser, running_browser
from support.cases import quick_first
from support.induction import save_induction
from support.jobs import job
from support.models import demo_tokenizer, save_tiny
from support.oscar_files import pair  # noqa: F401
from support.places import TESTS
from support.published import keys, listed, made, signed, zoo  # noqa: F401

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes of several threads each would wait for each other.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def move_seeds(offset: int) -> None:
    """Add `offset` to the seeds that tests set. Those of the package stay as they are, and large
    ones, which belong to an engine's format."""
    tests, set_seed, plain = str(TESTS), torch.manual_seed, torch.Generator

    def moved(seed: int) -> int:
        by_test = sys._getframe(2).f_code.co_filename.startswith(tests)
        return seed + offset if by_test and seed < 2**16 else seed

    class Generator(plain):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(moved(seed))

    torch.Generator = Generator
    torch.manual_seed = lambda seed: set_seed(moved(seed))


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets with how many threads torch computes, until the test has ended."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What uses `stream_order` runs both ways, but for tests on a GPU. Late work shows more."""
    if "stream_order" in metafunc.fixturenames and "device" not in metafunc.fixturenames:
        metafunc.parametrize("stream_order", quick_first(["late", "early"]), indirect=True)


@pytest.fixture
def stream_order(request, monkeypatch) -> None:
    """When the second stream of a GPU, played on a CPU, does its work."""
    from support.streams import LateStream, play

    if getattr(request, "param", "early") == "late":
        play(monkeypatch.setattr, LateStream(torch.device("cpu")))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    """That of the demo model, which no test may change."""
    return demo_tokenizer()


@pytest.fixture(scope="session")
def demo() -> transformers.PreTrainedModel:
    """The demo model in float32, which no test may change."""
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture
def copied_tiny(tiny, tmp_path) -> Path:
    """A copy of the tiny model, to change."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture(scope="session")
def induction(tmp_path_factory) -> Path:
    """A model that can do the tasks `needles` and `quote`, but not `key-value`."""
    return save_induction(tmp_path_factory.mktemp("models") / "induction")


@pytest.fixture(scope="session")
def calibrated(tiny, tmp_path_factory) -> Artifact:
    """The artifact of the tiny model, which no test may change."""
    from rotationzoo.calibration.calibrate import calibrate

    return calibrate(job(tiny, tmp_path_factory.mktemp("calibrated")))


def environment(home: Path) -> dict[str, str]:
    """That of commands: no hub in reach, and `home` for what comes from hubs."""
    kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    changed = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there
        "COLUMNS": "120",
        "CUDA_VISIBLE_DEVICES": "",  # the same everywhere; test_gpu.py is for GPUs
    }
    return kept | changed


ALONE = [sys.executable, "-m", "rotationzoo"]
# Elsewhere a fork is not safe after such imports.
forks = sys.platform == "linux"


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The words that start the command line in a process of its own, without the seconds that
    importing torch takes."""
    if not forks:
        yield ALONE
        return
    with process_server.server(tmp_path_factory.mktemp("server")) as words:
        yield words


@pytest.fixture
def command(tmp_path, program):
    """Runs the real command line in a process of its own, in an empty folder, with no hub in
    reach. `alone` means in an interpreter of its own, too, which imports everything itself."""
    variables = environment(tmp_path / "hf")
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)  # a test may use `command` and `inside`

    def run(*words, env=None, alone=False, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*(ALONE if alone else program), *map(str, words)],
            cwd=work,
            env={**variables, **(env or {})},
            text=True,
            timeout=300,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    run.folder, run.environment = work, variables
    return run


@pytest.fixture(scope="module")
def chromium():
    """One Chromium for the tests of a module. For a session it would stay in the way of libraries
    that start an event loop, because playwright's own runs as long as it does."""
    with running_browser() as running:
        yield running


@pytest.fixture
def browser(chromium) -> Browser:
    """`browser.open_page(path)`: a page in which nothing may go wrong until the test has ended."""
    yield chromium
    faults = chromium.close_pages()
    assert not faults, faults


def _stream(errors: str) -> io.TextIOWrapper:
    """A stream that encodes what it is sent, as those of a process do."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors)


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """The same command line in this process, which saves the seconds that importing torch takes."""
    from rotationzoo.cli.app import main

    work = tmp_path / "work"
    work.mkdir(exist_ok=True)  # a test may use `command` and `inside`
    monkeypatch.chdir(work)

    def run(*words) -> SimpleNamespace:
        stdout, stderr = _stream("strict"), _stream("backslashreplace")
        with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as stopped:
            main([*map(str, words)])
        return SimpleNamespace(
            returncode=stopped.value.code or 0, stdout=_written(stdout), stderr=_written(stderr)
        )

    run.folder = work
    return run
