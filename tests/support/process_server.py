"""Processes of the command line that start from one in which torch is imported already.

Importing torch takes most of the time of a short command. A server imports it once, and every
command is a fork of it: a process of its own, with its own environment, folder, streams, limit on
the size of files, and exit code. Signals must be sent to the fork: its id is written to the file
that the variable PROCESS_ID names. What reads the environment when it is imported, as the hub's
client does, is not imported before the fork.

    python process_server.py SOCKET     serves until its standard input ends
"""

import array
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IMPORTED = (
    "jinja2", "pydantic", "rich.console", "safetensors.torch", "scipy.linalg",
    "scipy.ndimage", "scipy.stats", "torch._dynamo", "torch.distributed.tensor", "typer", "yaml",
)  # fmt: skip
_STREAMS = 3
# It hands on its own streams, and waits for the exit code. It is a script, because shells start it
# too, and imports as little as it can.
CLIENT = """
import array, json, os, resource, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    request = {
        "words": sys.argv[2:], "environment": dict(os.environ), "folder": os.getcwd(),
        "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
    }
    server.sendmsg([b"x"], [rights])
    server.sendall(json.dumps(request).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.makefile().read() or 1))
"""


@contextmanager
def server(folder: Path) -> Iterator[list[str]]:
    """Inside the block a server runs; yields the words to start a process of the command line with,
    in place of `python -m rotationzoo`."""
    client, path = folder / "client.py", folder / "socket"
    client.write_text(CLIENT)
    # In a session of its own, where Ctrl-C does not reach it.
    running = subprocess.Popen(
        [sys.executable, __file__, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    # A fork of this process would keep it open, and the server would not end.
    os.register_at_fork(after_in_child=running.stdin.close)
    try:
        assert running.stdout.readline() == b"ready\n"
        yield [sys.executable, "-S", "-I", str(client), str(path)]
    finally:
        running.communicate()


def serve(path: str) -> list[str]:
    """Serve requests. Returns in each process that was forked for one, with its words."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
        os.write(1, b"ready\n")
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0 and (words := _answer(connection)) is not None:
                    return words
    os._exit(0)


def _answer(connection: socket.socket) -> list[str] | None:
    """In a fork of the server: fork again, wait for that process, and answer with its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size = _STREAMS * array.array("i").itemsize
    _, rights, *_ = connection.recvmsg(1, socket.CMSG_SPACE(size))
    streams = array.array("i", rights[0][2][:size])
    request = json.loads(connection.makefile().read())
    if child := os.fork():
        if path := request["environment"].get("PROCESS_ID"):
            Path(path).write_text(str(child))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(str(code).encode())
        os._exit(0)
    # A suite that runs in the background of a shell ignores Ctrl-C, and so would this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    resource.setrlimit(resource.RLIMIT_FSIZE, tuple(request["file_size"]))
    os.environ.clear()
    os.environ.update(request["environment"])
    return request["words"]


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    early = {"huggingface_hub", "transformers", "datasets", "modelscope"} & set(sys.modules)
    assert not early, f"these read the environment: {early}"
    gc.freeze()  # what is shared stays shared
    sys.argv = ["rotationzoo", *serve(sys.argv[1])]
    # As in a new interpreter.
    sys.path[0] = os.getcwd()  # as `python -m` has it
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    runpy.run_module("rotationzoo", run_name="__main__", alter_sys=True)
