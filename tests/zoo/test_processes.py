"""The commands in processes of their own: as a user runs them, killed, and on a full disk."""

import signal

import pytest
from support.command_line import stop_once, succeeded
from support.hubs.hub import Fault
from support.published import ZOO, hub_environment


@pytest.fixture
def environment(command, zoo, tmp_path) -> dict[str, str]:
    """That of a command in a process of its own that asks these hubs."""
    return command.environment | hub_environment(zoo.hf, zoo.ms, tmp_path)


@pytest.mark.parametrize(
    "words",
    [("push", "{made}", ZOO), ("pull", "demo", "--repo", ZOO, "--local-dir", "here")],
    ids=["push", "pull"],
)
def test_killed_in_the_middle(zoo, program, environment, made, words):
    if words[0] == "pull":
        succeeded(zoo.run("push", made, ZOO))
    words = [word.format(made=made) for word in words]
    slow = Fault("PUT" if words[0] == "push" else "GET", "/storage/", 503, 99)
    zoo.hf.faults.append(slow)
    start = [*program, *words]
    stop_once(lambda: slow.count < 99, signal.SIGKILL, start, zoo.folder, environment)
    assert slow.count < 99, "it was in the middle"
    assert not (zoo.folder / "here").exists()
    zoo.hf.faults.clear()
    succeeded(zoo.run(*words))
    if words[0] == "pull":
        assert sorted(path.name for path in zoo.folder.iterdir()) == ["here"]
    else:
        assert zoo.hf.commits(ZOO) == 2


def test_a_full_disk(zoo, command, environment, made):
    import resource

    pull = ["pull", "demo", "--repo", ZOO, "--local-dir", "here"]
    succeeded(zoo.run("push", made, ZOO))
    limited = command(
        *pull,
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert limited.returncode == 1, limited.stderr
    assert "Traceback" not in limited.stderr
    assert not (zoo.folder / "here").exists()
    succeeded(zoo.run(*pull))
