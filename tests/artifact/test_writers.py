"""Writers that are killed at any step, or that run at once: nothing is lost, and no reader finds a
mixture of two states."""

import fcntl
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from support.cases import quick_first

from rotationzoo.artifact.reductions import Request
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.calibrate import calibrate
from rotationzoo.calibration.plan import Job
from rotationzoo.calibration.soundness import Verification
from rotationzoo.checks.verify import unlisted_files, verify
from rotationzoo.engines.export import export
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.recipe.loading import PRESETS
from rotationzoo.storage import files, folders
from rotationzoo.storage.folders import locked
from rotationzoo.writer import add_files, check_writable, write_artifact


def another(small: Path, folder: Path, name: str) -> Path:
    """Another artifact of the same model."""
    changed = PRESETS[name].model_copy(update={"pooling": "layer"})
    return calibrate(Job(str(small.parent / "tiny"), changed, folder, device="cpu")).folder


# The calls of `os` by which a writer changes the disk.
STEPS = ("open", "link", "unlink", "mkdir", "rmdir", "rename", "replace", "chmod")


def killed_at(number: int, work) -> bool:
    """Do the work in a process that is killed at the given call. Whether it was done before."""
    if (child := os.fork()) == 0:
        calls = 0

        def dying(call):
            def counted(*args, **options):
                nonlocal calls
                calls += 1
                if calls == number:
                    os._exit(9)
                return call(*args, **options)

            return counted

        for name in STEPS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), "the work failed before it was killed"
    return code == 0


def at_every_step(work, check) -> int:
    """The number of steps. `check` is called after a kill at each of them."""
    for number in range(1, 500):
        done = killed_at(number, work)
        check(done)
        if done:
            return number - 1
    raise AssertionError("no end")


@pytest.mark.hostile("crash")
def test_an_artifact_is_sound_after_a_kill_at_any_step_of_adding(folder):
    def add() -> None:
        add_files(Artifact.open(folder), {"answers.png": b"picture"}, {"seen": 1})

    def check(done: bool) -> None:
        artifact = Artifact.open(folder)
        assert artifact.damaged_files() == unlisted_files(artifact) == []
        metrics, named = (artifact.content[key] for key in ("metrics", "files"))
        assert ("seen" in metrics) == ("answers.png" in named)

    assert at_every_step(add, check) > 10


@pytest.mark.hostile("crash")
def test_an_artifact_is_old_or_new_after_a_kill_at_any_step(small, folder, tmp_path):
    other = Artifact.open(another(small, tmp_path / "other", "hadamard"))
    old = Artifact.open(folder).identity
    manifest = {k: v for k, v in other.content.items() if k not in ("schema", "files")}

    def replace() -> None:
        write_artifact(folder, other.rotations, None, manifest)

    def check(done: bool) -> None:
        artifact = Artifact.open(folder)
        assert artifact.damaged_files() == []
        assert artifact.identity in (old, other.identity)
        named = {*artifact.content["files"], "manifest.json", "README.md"}
        assert {path.name for path in folder.iterdir()} == named

    assert at_every_step(replace, check) > 10


@pytest.mark.hostile("crash")
@pytest.mark.parametrize("engine", quick_first(["sglang", "vllm-oscar"]))
def test_an_export_is_old_or_new_after_a_kill_at_any_step(small, tmp_path, monkeypatch, engine):
    """An engine with new keys and old values serves garbage, and none of them detects it."""
    monkeypatch.setenv("SGLANG_OSCAR_CALIBRATION_LOCK_DIR", str(tmp_path / "locks"))
    target = tmp_path / "export"
    request = Request(engine, target)
    first, other = (
        Artifact.open(another(small, tmp_path / name, name)) for name in ("hadamard", "random")
    )
    wanted = [set(export(artifact, request).files.items()) for artifact in (other, first)]
    assert all(name.endswith(".json") for name, _ in wanted[0] & wanted[1])
    # Not in a forked process, where LAPACK waits for missing threads.
    sound = Verification([], None, [])
    monkeypatch.setattr("rotationzoo.engines.export.verify", lambda _: sound)

    def replace() -> None:
        export(other, request)

    def check(done: bool) -> None:
        folders.recover(target)
        paths = [path for path in target.iterdir() if path.name != "export.json"]
        held = {(path.name, files.sha256(path)) for path in paths}
        assert held in wanted
        if held == wanted[0] and not done:
            export(first, request)

    assert at_every_step(replace, check) > 10


@pytest.mark.hostile("crash")
def test_what_was_set_aside_is_put_back_by_whoever_reads(inside, folder):
    folder.rename(folder.with_name(".out.old"))
    for words in (("inspect", folder), ("verify", folder)):
        assert inside(*words).returncode == 0
    assert {path.name for path in folder.parent.iterdir()} == {"out", "work"}


def add_one(folder: str, name: str, metric: str, ready, go) -> None:
    artifact = Artifact.open(Path(folder))
    ready.release()
    go.wait(60)
    add_files(artifact, {name: name.encode()}, {metric: {"a": 1}})


@pytest.mark.hostile("crash")
def test_what_two_add_at_once_is_all_there(folder):
    """Each opened the artifact before the others added anything."""
    context = multiprocessing.get_context("fork")
    ready, go = context.Semaphore(0), context.Event()
    added = {"report.html": "one", "answers.png": "two", "int2.cu": "three"}
    arguments = [(str(folder), *pair, ready, go) for pair in added.items()]
    writers = [context.Process(target=add_one, args=each) for each in arguments]
    for writer in writers:
        writer.start()
    for _ in writers:
        assert ready.acquire(timeout=60)
    go.set()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    artifact = Artifact.open(folder)
    assert verify(artifact).problems == []
    assert set(added) <= artifact.content["files"].keys()
    assert set(added.values()) <= artifact.content["metrics"].keys()


@pytest.mark.hostile("crash")
def test_nothing_is_added_to_other_rotations(small, folder):
    artifact = Artifact.open(folder)
    shutil.rmtree(folder)
    another(small, folder, "hadamard")
    with pytest.raises(RotationZooError, match="now holds other rotations"):
        add_files(artifact, {"answers.png": b""}, {})
    with pytest.raises(RotationZooError, match="was replaced while it was read"):
        len(artifact.rotations)


@pytest.mark.hostile("crash")
@pytest.mark.parametrize("name", ["manifest.json", "rotations.safetensors"])
def test_a_reader_that_meets_a_replacement_reads_again(folder, monkeypatch, name):
    """Between the two renames there is no such file."""
    real, met = files.size_of, []
    monkeypatch.setattr(files, "size_of", lambda path: meet(path) if not met else real(path))

    def meet(path: Path) -> int | None:
        if path.name != name:
            return real(path)
        met.append(path)
        work, old = (folder.with_name(f".out.{what}") for what in ("partial", "old"))
        shutil.copytree(folder, work)
        folder.rename(old)
        size = real(path)
        work.rename(folder)
        shutil.rmtree(old)
        return size

    assert Artifact.open(folder).rotations
    assert met


@pytest.mark.hostile("crash")
@pytest.mark.parametrize("what", ["evaluate", "report", "export", "calibrate"])
def test_who_waits_says_for_what_and_gives_up(inside, small, folder, monkeypatch, caplog, what):
    monkeypatch.setattr("rotationzoo.storage.folders.WAIT", 0.1)
    export_to = inside.folder / "export"
    new = inside.folder / "new"
    words = {
        "evaluate": (small.parent / "tiny", folder, "--tasks", "none", "--save"),
        "report": (folder, "--save"),
        "export": (folder, "--to", "sglang", "-o", export_to),
        "calibrate": ("demo", "--recipe", "hadamard", "-o", new),
    }[what]
    checkpoint = inside.folder / "new.checkpoint.safetensors"
    place = {"export": export_to, "calibrate": checkpoint}.get(what, folder)
    lock = place.with_name(f".{place.name}.lock")
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = inside(what, *words)
        assert result.returncode == 1
        assert "gave up after 0.1 s" in result.stderr
        assert "Waiting up to 0.1 s for another process" in caplog.text + result.stderr
    lock.unlink()


def test_a_lock_whose_file_was_removed_is_no_lock(tmp_path):
    """A killed process leaves an unlocked file. The last holder removes the file, which another
    process may have opened before."""
    lock = tmp_path / "lock"
    lock.write_text("of a killed process")
    order = []

    def hold(name: str) -> None:
        with locked(lock, "writing"):
            order.append(f"{name} in")
            time.sleep(0.02)
            order.append(f"{name} out")

    threads = [threading.Thread(target=hold, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lock.exists()
    for entered, left in zip(order[::2], order[1::2], strict=True):
        assert entered.replace("in", "out") == left, "one at a time"


def test_the_folder_that_one_is_in_is_not_replaced(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for path in (folder, folder.parent):
        with pytest.raises(UsageError, match="contains the current folder"):
            folders.check_name(path)
    with pytest.raises(UsageError, match="contains the current folder"):
        check_writable(Artifact.open(Path(".")))


def test_what_else_is_in_a_folder_stays(folder):
    (folder / "notes" / "deep").mkdir(parents=True)
    (folder / "notes" / "deep" / "a.txt").write_text("mine")
    (folder / "link").symlink_to("notes")
    (folder / "notes").chmod(0o700)
    folder.chmod(0o750)
    rotations = (folder / "rotations.safetensors").stat()
    add_files(Artifact.open(folder), {"answers.png": b""}, {})
    assert (folder / "notes" / "deep" / "a.txt").read_text() == "mine"
    assert os.readlink(folder / "link") == "notes"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "notes")] == [0o750, 0o700]
    assert os.path.samestat((folder / "rotations.safetensors").stat(), rotations), "not copied"


@pytest.mark.parametrize("what", ["the folder", "the folder above"])
def test_somebody_who_may_not_write_changes_nothing(small, what):
    """Not as root, for whom read-only folders are no obstacle."""
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to other users
        os.chmod(place, 0o777 if what == "the folder" else 0o755)
        folder = Path(shutil.copytree(small, Path(place) / "out"))
        os.chmod(folder, 0o555 if what == "the folder" else 0o777)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        if (child := os.fork()) == 0:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            try:
                check_writable(Artifact.open(folder))
            except RotationZooError as error:
                os._exit(7 if "Permission denied" in str(error) else 8)
            except BaseException:
                os._exit(9)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
