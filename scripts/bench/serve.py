"""A vLLM server with rotations, and as it is in bfloat16, asked by vLLM's own benchmark client.

    .venv-vllm/bin/python scripts/bench/serve.py MODEL ROTATIONS [--input 900] [--output 128]
        [--prompts 8] [--together 4] [--rounding nearest] [--folder FOLDER]

Run it with the Python that has vLLM. One server after the other is started on this machine, gets
the same random prompts, and is stopped. Both have bfloat16 and the same options.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from rotationzoo.vllm import WORKER
from rotationzoo.vllm.command import EVERY_LAYER, server_command
from rotationzoo.vllm.plugin import choose_package

# The client's own command is part of `vllm`, which the package for CPUs cannot start.
CLIENT = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
FIGURES = {
    "output_throughput": "tokens/s",
    "mean_ttft_ms": "ms to the first token",
    "mean_tpot_ms": "ms for each further token",
}


@contextmanager
def serving(args: argparse.Namespace, rotated: bool, folder: Path) -> Iterator[str]:
    """The address of a server, while it runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = server_command(choose_package()[0], args.model, has_windows=False)
    if not rotated:
        words = [word for word in words if word not in (*EVERY_LAYER, "--worker-cls", WORKER)]
    words += ["--port", str(port), "--dtype", "bfloat16", "--no-enable-prefix-caching"]
    if rotated:
        options = {"artifact": str(Path(args.artifact).absolute()), "rounding": args.rounding}
        words += ["--additional-config", json.dumps({"rotationzoo": options})]
    with (folder / f"server{port}.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                sys.exit(f"the server ended: see {log.name}")
            with suppress(OSError), urllib.request.urlopen(f"{address}/health"):
                break
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait()


def ask(address: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """What the client measured."""
    options = {
        "base-url": address,
        "dataset-name": "random",
        "random-input-len": args.input,
        "random-output-len": args.output,
        "num-prompts": args.prompts,
        "num-warmups": 1,
        "max-concurrency": args.together,
        "result-dir": folder,
        "result-filename": "result.json",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-c", CLIENT, *words, "--ignore-eos", "--save-result"]
    subprocess.run([*command, "--disable-tqdm"], check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("artifact")
    parser.add_argument("--input", type=int, default=900, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--together", type=int, default=4, help="requests at the same time")
    parser.add_argument("--rounding", help="nearest or feedback")
    parser.add_argument("--folder", type=Path, help="for logs; a new one by default")
    args = parser.parse_args()
    folder = args.folder or Path(mkdtemp())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    measured = {}
    for name in ("bfloat16", "2 bits"):
        with serving(args, name == "2 bits", folder) as address:
            measured[name] = ask(address, args, folder)
        print(f"{name}: {measured[name]}", file=sys.stderr, flush=True)
    print("| | bfloat16 | 2 bits | ratio |\n|---|---|---|---|")
    for figure, words in FIGURES.items():
        plain, ours = (measured[name][figure] for name in ("bfloat16", "2 bits"))
        print(f"| {words} | {plain:.1f} | {ours:.1f} | {ours / plain:.2f} |")


if __name__ == "__main__":
    main()
