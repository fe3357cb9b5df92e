"""Whether two GPUs give what one does, and how much faster: for a machine with two, without a
network, in under four minutes.

    python scripts/bench/check_ranks.py [--layers 12] [--tokens 1048576] [--folder FOLDER]
        [--parts abc]

* a: `calibrate` with torchrun and NCCL beside one process, of a model with random bfloat16 weights
  in the geometry of Qwen3-8B, with fewer layers: its statistics, and the seconds of its passes.
* b: `evaluate` with tasks under torchrun beside one process: the whole report.
* c: a process killed with SIGKILL in the middle of `calibrate`: how the others end, and what the
  next run of the same command makes.

tests/test_gpu.py compares a model that is split over two GPUs with one. With `--try-on-cpu` a small
model stands for the large one, to try the script itself. Each check is a line, and the exit code is
1 if one has failed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "scripts" / "bench" / "timed_command.py"
TOKENIZER = ROOT / "rotationzoo" / "data" / "demo" / "model"
# https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json; embeddings are tied to save time.
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 2048,
}  # fmt: skip
ROUNDING = 1e-12  # of float64 sums in another order; 2e-16 was measured on a CPU
FASTER = 1.8
PARTS = {"a": "calibrate", "b": "evaluate", "c": "a killed process"}


class Checks:
    """Prints a line for each check, and remembers whether all have passed."""

    def __init__(self) -> None:
        self.failed, self.start = 0, time.monotonic()

    def tell(self, passed: bool | None, what: str) -> None:
        word = {True: "ok", False: "FAILED", None: "measured"}[passed]
        self.failed += passed is False
        print(f"[{time.monotonic() - self.start:4.0f} s] {word:8} {what}", flush=True)


class Commands:
    """Starts the command line alone on the first GPU, or as two processes under torchrun, in a
    folder of its own."""

    def __init__(self, folder: Path, on_cpu: bool):
        self.folder, self.on_cpu = folder, on_cpu

    def start(self, marks: str, *words: object, processes: int = 1) -> subprocess.Popen[str]:
        """Start a command. The seconds of its passes are kept under the name `marks`."""
        place = self._place(marks)
        place.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", processes]
        start = [sys.executable, *(launcher if processes > 1 else [])]
        path = os.pathsep.join([str(ROOT), *sys.path[1:]])
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        if processes == 1:
            environment["CUDA_VISIBLE_DEVICES"] = "" if self.on_cpu else "0"
        device = ["--device", "cpu", "--dtype", "float32"] if self.on_cpu else []
        program = [*start, COMMAND, place, *words, *device]
        return subprocess.Popen(
            [str(word) for word in program],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, marks: str, *words: object, processes: int = 1) -> str:
        """What a command prints, which must end well."""
        process = self.start(marks, *words, processes=processes)
        stdout, stderr = process.communicate(timeout=240)
        if process.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))} failed:\n{stderr[-4000:]}")
        return stdout

    def times(self, marks: str) -> dict[str, tuple[float, float]]:
        """Of all processes, the first and the last time at which passes began (`start`), ended
        (`own`), and were added up (`end`)."""
        paths = self._place(marks).glob("times.*")
        all_times = [json.loads(path.read_text()) for path in paths]
        names = "start", "own", "end"
        return {name: _ends([times[name] for times in all_times]) for name in names}

    def begun(self, marks: str) -> list[Path]:
        """The files that two processes write when their passes begin."""
        return [self._place(marks) / f"begun.{rank}" for rank in (0, 1)]

    def _place(self, marks: str) -> Path:
        return self.folder / "marks" / marks


def save_model(folder: Path, layers: int, device: str) -> Path:
    """Save a Qwen3 with random bfloat16 weights, made on the device, and the demo's tokenizer."""
    shape = SMALL if device == "cpu" else QWEN3_8B
    config = Qwen3Config(
        **shape, num_hidden_layers=layers, max_position_embeddings=40960, bos_token_id=None,
        eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


def write_text(path: Path, tokens: int) -> Path:
    """Write at least so many tokens of random words."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(5000)]
    with path.open("w") as file:
        for _ in range(tokens // 5000 + 2):  # a word has two tokens or more
            file.write(json.dumps({"text": " ".join(drawn.choices(words, k=4000))}) + "\n")
    return path


def _ends(times: list[float]) -> tuple[float, float]:
    return min(times), max(times)


def difference(folder: Path, other: Path) -> float:
    """The largest relative difference between the statistics of two artifacts."""
    tensors, others = (load_file(each / "statistics.safetensors") for each in (folder, other))
    assert tensors.keys() == others.keys()
    return max(float(_relative(tensor, others[name])) for name, tensor in tensors.items())


def _relative(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    norm = tensor.double().norm()
    return (tensor.double() - other.double()).norm() / norm.clamp(min=1e-300)


def largest_change(report: Any, other: Any) -> float:
    """The largest relative difference between numbers of two reports; infinite where anything else
    differs."""
    if isinstance(report, dict) and isinstance(other, dict) and report.keys() == other.keys():
        return max((largest_change(report[key], other[key]) for key in report), default=0.0)
    if isinstance(report, list) and isinstance(other, list) and len(report) == len(other):
        pairs = zip(report, other, strict=True)
        return max((largest_change(*pair) for pair in pairs), default=0.0)
    if type(report) is float and type(other) is float:
        return abs(report - other) / max(abs(report), abs(other), 1e-300)
    return 0.0 if report == other else float("inf")


class Parts:
    """The parts of the check, which share a model, a text and the artifacts made so far."""

    def __init__(self, settings: argparse.Namespace, folder: Path):
        self.settings, self.folder, self.on_cpu = settings, folder, settings.try_on_cpu
        self.where = {"dtype": "bfloat16"}
        if self.on_cpu:
            self.where = {"device": "cpu", "dtype": "float32"}
        self.checks, self.commands = Checks(), Commands(folder, self.on_cpu)
        device = "cpu" if self.on_cpu else "cuda:0"
        text = write_text(folder / "text.jsonl", settings.tokens)
        model = save_model(folder / "model", settings.layers, device)
        if not self.on_cpu:
            torch.cuda.empty_cache()
        size = sum(path.stat().st_size for path in model.iterdir())
        self.checks.tell(None, f"{settings.layers} layers written, {size / 1e9:.1f} GB")
        self.calibrate = [
            "calibrate", model, "--data", text, "--tokens", settings.tokens,
            "--length", settings.length, "--batch", 4, "--quiet",
        ]  # fmt: skip

    def a(self) -> None:
        """`calibrate` under torchrun."""
        self.commands.run("alone", *self.calibrate, "--output", "alone")
        self.commands.run("shared", *self.calibrate, "--output", "shared", processes=2)
        change = difference(self.folder / "alone", self.folder / "shared")
        told = f"statistics of two processes: {change:.1e} from those of one (allowed {ROUNDING})"
        self.checks.tell(change <= ROUNDING, told)
        one, two = self.commands.times("alone"), self.commands.times("shared")
        alone, shared = (each["end"][1] - each["start"][0] for each in (one, two))
        ratio, late = alone / shared, two["start"][1] - two["start"][0]
        passes = two["own"][1] - two["start"][1]
        told = (
            f"passes over {self.settings.tokens:,} tokens: {alone:.2f} s alone, {shared:.2f} s "
            f"shared, {ratio:.2f} x as fast. One process began {late:.2f} s after the other, "
            f"connecting and adding up took {two['end'][1] - two['own'][1]:.2f} s, and without "
            f"both it is {alone / passes:.2f} x"
        )
        self.checks.tell(None if self.on_cpu else ratio >= FASTER, told)

    def b(self) -> None:
        """`evaluate` under torchrun, of a model that answers."""
        made = self._demo("evaluated")
        words = ["evaluate", "demo", made, "--tokens", 4096, "--length", 1024, "--json"]
        words += ["--tasks", "needles", "--questions", 8]
        alone = json.loads(self.commands.run("one", *words))
        shared = json.loads(self.commands.run("two", *words, processes=2))
        questions = next(iter(alone["arms"].values()))["all_tasks"]["questions"]
        change = largest_change(alone, shared)
        told = f"evaluate with {questions} questions an arm, two processes: report {change:.1e}"
        self.checks.tell(change == 0, f"{told} from that of one (allowed 0)")

    def c(self) -> None:
        """A process killed while it runs its share."""
        words = [*self.calibrate, "--output", "killed"]
        process = self.commands.start("dead", *words, processes=2)
        _wait_for(process, self.commands.begun("dead"))
        time.sleep(0.5 if self.on_cpu else 2)
        os.kill(_process_of_rank(process.pid, 1), signal.SIGKILL)
        killed = time.monotonic()
        _, stderr = process.communicate(timeout=120)
        seconds = time.monotonic() - killed
        lines = [line for line in stderr.splitlines() if line.startswith("Error: ")]
        saved = [path.name for path in self.folder.glob("killed.checkpoint*")]
        one = len(lines) == 1 and "a process of this command is gone" in lines[0]
        told = f"after SIGKILL: exit code {process.returncode} in {seconds:.1f} s, {lines}"
        self.checks.tell(process.returncode == 1 and one, f"{told}; saved: {saved}")
        self.checks.tell(not (self.folder / "killed").exists(), "nothing half-written")
        self.commands.run("again", *words, processes=2)
        if not (self.folder / "shared").exists():
            self.commands.run("shared", *self.calibrate, "--output", "shared", processes=2)
        files = [self.folder / name / "rotations.safetensors" for name in ("killed", "shared")]
        same = files[0].read_bytes() == files[1].read_bytes()
        times = self.commands.times("again")
        passes = times["end"][1] - times["start"][0]
        left = [path.name for path in self.folder.glob("killed.checkpoint*")]
        told = f"the next run ({passes:.1f} s of passes) writes the bytes of an unbroken one"
        self.checks.tell(same and not left, told)

    def _demo(self, name: str) -> Path:
        """An artifact of the demo model."""
        from rotationzoo.calibration.job import calibrate
        from rotationzoo.calibration.plan import Job
        from rotationzoo.recipe import PRESETS, Data

        recipe = PRESETS["oscar"].model_copy(update={"data": Data(tokens=8192, length=512)})
        return calibrate(Job("demo", recipe, self.folder / name, **self.where)).folder


def _wait_for(process: subprocess.Popen[str], paths: list[Path]) -> None:
    until = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the passes never began:\n{process.communicate()[1][-4000:]}")
        time.sleep(0.05)


def _process_of_rank(launcher: int, rank: int) -> int:
    """The process that torchrun started with this number."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (path / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):  # it has ended
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(path.name)
    raise RuntimeError(f"torchrun has no process {rank}")


def main() -> None:
    from rotationzoo.cli.library_logs import hush_libraries

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1_048_576)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where the model is written (a temporary one)")
    parser.add_argument("--parts", default="abc", help="which parts, in which order")
    parser.add_argument("--try-on-cpu", action="store_true")
    settings = parser.parse_args()
    if not settings.try_on_cpu and torch.cuda.device_count() < 2:
        raise SystemExit("two GPUs are needed; --try-on-cpu tries the script itself")
    hush_libraries()
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="check-ranks-") as folder:
        parts = Parts(settings, Path(folder))
        for name in settings.parts:
            try:
                getattr(parts, name)()
            except Exception as error:
                parts.checks.tell(False, f"{PARTS[name]}: {type(error).__name__}: {error}")
    raise SystemExit(1 if parts.checks.failed else 0)


if __name__ == "__main__":
    main()
