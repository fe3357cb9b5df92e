"""Mistakes: one sentence on stderr, the same in JSON, and nothing left behind."""

import errno
import json
import os

import pytest
from support.command_line import left_behind, only_error

from rotationzoo.storage import folders

MISTAKES = [
    ("nonsense", 2, "No such command 'nonsense'"),
    ("calibrat demo", 2, "Did you mean 'calibrate'"),
    ("calibrate", 2, "Missing argument 'model'"),
    ("calibrate empty", 1, "empty is not a model: the folder has no config.json"),
    ("calibrate models/Qwen", 1, "nor a folder (did you mean 'models/Qwen3'?)"),
    ("calibrate demo --revision main", 1, "on this machine, which has no revision 'main'"),
    ("calibrate demo --data other.jsonl --column bodi --dry-run", 1, "no column bodi: it has body"),
    ("calibrate demo --recipe groups.yaml", 1, "groups of 48 channels do not divide heads of 64"),
    ("calibrate demo --output occupied", 1, "occupied exists and is not an artifact"),
    ("calibrate demo --output .", 2, "not a folder that can be replaced"),
    ("calibrate demo --device x", 2, "'--device': 'x' is not one of 'auto', 'cpu', 'cuda'"),
    ("calibrate demo --tokens 1000", 1, "1,000 tokens cannot fill one row of 2,048"),
    ("calibrate demo --tokens 0", 2, "value for '--tokens': it must be greater than or equal to 1"),
    ("calibrate demo --bits 1", 2, "bits = 1.0 is not a budget of more than 1 and at most 4 bits"),
    ("calibrate demo --key-bits 3 --value-bits 20", 2, "value_bits = 20.0 is not a budget of"),
    ("calibrate demo --key-bits 3", 2, "give bits, or key_bits and value_bits together"),
    ("calibrate demo --bits 2.5 --key-bits 3", 2, "give bits, or key_bits and value_bits"),
    ("calibrate demo --for vlm", 2, "'vlm' is not one of"),
    ("calibrate demo --recipe oscar --length 32", 1, "nothing past the 64 sink tokens"),
    ("calibrate demo --bits abc", 2, "Invalid value for '--bits': "),
    ("calibrate demo --keep 0", 2, "--keep is percent of the answers, from 1 to below 100"),
    ("evaluate demo {made} --keep 0.95", 2, "write it as: --keep 95"),
    ("evaluate demo --keep 95", 2, "--keep is for rotations"),
    ("calibrate demo --lengths 512", 2, "--lengths is only for the questions of --keep"),
    ("calibrate demo --max-memory cpu=1GiB", 2, "--max-memory needs a device map"),
    ("calibrate demo --device-map auto --max-memory cpu", 2, "has no amount"),
    ("calibrate demo --device-map foo", 2, "there is no device map 'foo'"),
    ("evaluate demo --prefill-layout window", 2, "--prefill-layout is for a prefill in chunks"),
    ("evaluate {made} demo", 2, "with their model: rotationzoo evaluate demo {made}"),
    ("evaluate demo {made} --for llama.cpp", 2, "codebook of its own"),
    ("generate demo --rotations {made} --for llama.cpp", 2, "codebook of its own"),
    ("generate {made} -p x", 2, "rotationzoo generate demo --rotations {made}"),
    ("generate demo --rotations none -p x -f y", 2, "exclude each other"),
    ("generate demo --rotations none -f y", 2, "y cannot be read: No such file"),
    ("report demo {made}", 2, "unexpected extra argument"),
    ("export {made} --fro vllm", 2, "Possible options: --for"),
    ("export {made} --for vllm -o out", 2, "vllm reads the folder as it is"),
    ("serve demo {made} --dry-run", 2, "rotationzoo serve MODEL --rotations FOLDER"),
    ("serve demo --rotations nothing --dry-run", 1, "nothing is not an artifact"),
    ("plan demo --gpu h300", 2, "did you mean"),
    ("plan demo --rope-scaling yarn", 2, "must be written as yarn:4"),
    ("plan demo --format gguf", 2, "'segments', 'vllm', 'sglang'"),
    ("plan demo --bits 2.5 --format vllm", 2, "rows of the format vllm have the same"),
    ("push {made} zoo --dry-run", 2, "zoo is not a repository"),
    ("push {made} a/b/c --dry-run", 2, "a/b/c is not a repository"),
    ("push {made} me/zoo --adopt-index", 2, "--adopt-index"),
    ("regenerate", 2, "regenerate --plan"),
]


@pytest.mark.parametrize(("words", "code", "says"), MISTAKES)
def test_a_mistake_is_one_sentence_and_the_same_in_json(inside, made, words, code, says):
    (inside.folder / "empty").mkdir()
    (inside.folder / "models/Qwen3").mkdir(parents=True)
    (inside.folder / "occupied").mkdir()
    (inside.folder / "occupied" / "file").write_text("mine")
    (inside.folder / "groups.yaml").write_text("group_size: 48\n")
    (inside.folder / "other.jsonl").write_text('{"body": "x"}\n')
    before = left_behind(inside)
    words = words.format(made=made).split()
    result = inside(*words, "--json")
    assert result.returncode == code
    content = json.loads(result.stdout)
    assert set(content) == {"error", "hint"}
    assert says.format(made=made) in f"{content['error']}\n{content['hint']}\n"
    assert "Input should" not in content["error"]
    first = result.stderr.splitlines()[0]
    assert first == f"Error: {content['error']}", "people read it where they always do"
    assert only_error(inside(*words), code).splitlines()[0] == first
    assert left_behind(inside) == before


@pytest.mark.parametrize("place", ["/proc/here", "/proc/no/such"])
def test_a_place_that_cannot_be_written_is_refused_at_once(inside, artifact, monkeypatch, place):
    """Not after a wait for another process that might be writing there."""
    monkeypatch.setattr(folders, "WAIT", 2.0)
    for words in (
        ["export", artifact, "--to", "sglang"],
        ["import", "no-such-file", "--model", "demo"],
        ["calibrate", "demo", "--recipe", "hadamard"],
    ):
        says = only_error(inside(*words, "-o", place))
        assert says.startswith(f"Error: {place} cannot be written: ")


@pytest.mark.parametrize(
    ("number", "helps"),
    [
        (errno.ENOSPC, "make room, or "),
        (errno.EROFS, "mount it for writing, or "),
        (errno.EACCES, "check who may read and write there, or "),
        (errno.EPERM, "check who may read and write there, or "),
        (errno.EIO, ""),
    ],
)
def test_only_a_full_disk_is_called_full(inside, monkeypatch, number, helps):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folders, "_open", refuse)
    says = only_error(inside("calibrate", "demo", "--recipe", "hadamard", "-o", "out"))
    error = f"Error: out cannot be written: {os.strerror(number)}\n"
    assert says == f"{error}Hint: {helps}choose another place with --output\n"


@pytest.mark.parametrize("command", ["calibrate", "plan", "evaluate", "serve"])
def test_a_mistyped_folder_of_a_model(inside, monkeypatch, command):
    monkeypatch.setenv("HOME", str(inside.folder))
    (inside.folder / "my-model").mkdir()
    for place in (".", inside.folder, "~"):
        says = only_error(inside(command, f"{place}/my-modle/"))
        meant = f"(did you mean '{place}/my-model'?)"
        assert says.startswith(f"Error: there is no folder {place}/my-modle/ {meant}\n")
    says = only_error(inside(command, "./another"))
    assert says.startswith("Error: there is no folder ./another\n")
