"""The entries of an artifact's folder that its manifest does not list, and which of them the
clients of hubs leave there."""

import os
import pickletools
import re
from pathlib import Path

from rotationzoo.artifact.store import CARD, MANIFEST, SIGNATURE, Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import files
from rotationzoo.storage.files import read_settled

# What the clients of hubs and the Finder leave in a folder, and no engine reads.
_LEFT_BEHIND = re.compile(
    r"\.gitattributes|\.DS_Store|\.mv|\.msc|\.mdl"
    r"|\.cache/huggingface/(\.gitignore(\.lock)?|CACHEDIR\.TAG|trees/[0-9a-f]{40}\.json)"
    r"|\.cache/huggingface/download/[^/]+\.(metadata|lock|incomplete)"
)
_LEFT_FOLDERS = ".cache", "._____temp"
_PICKLES = ".msc", ".mdl"  # earlier versions of ModelScope's client write and load them
_PLAIN_OPCODES = {"PROTO", "FRAME", "MARK", "STOP", "NONE", "MEMOIZE", "BINGET", "BINPUT"}
_PLAIN_OPCODES |= {"LONG_BINGET", "LONG_BINPUT", "SHORT_BINUNICODE", "BINUNICODE", "BININT"}
_PLAIN_OPCODES |= {"BININT1", "BININT2", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT"}
_PLAIN_OPCODES |= {"SETITEM", "SETITEMS"}
_PICKLE_LIMIT = 1 << 20


def unlisted_files(artifact: Artifact) -> list[str]:
    """One sentence for each entry of the folder that the manifest does not list, but for the
    manifest itself, the card, the signature, and what the clients of hubs leave behind."""
    folder, problems = artifact.folder, []
    for name in read_settled(folder, lambda: sorted(os.listdir(folder))):
        if name in artifact.manifest.files:
            continue
        path = folder / name
        if name not in (MANIFEST, CARD, SIGNATURE):
            if foreign := _foreign_file(folder, name):
                problem = f"{foreign} is not in the manifest: whoever made it did not write it"
                problems.append(problem)
        elif path.is_symlink() or not path.is_file():
            problems.append(f"{name} is not a file")
    return problems


def _foreign_file(folder: Path, name: str) -> str | None:
    """The first file of an entry that no client of a hub leaves in a folder; None if there is
    none."""
    top = folder / name
    if top.is_symlink() or not top.is_dir():
        return None if _is_left_behind(folder, top) else name
    if name not in _LEFT_FOLDERS:
        return name
    unreadable: list[OSError] = []
    for parent, inner, names in os.walk(top, onerror=unreadable.append):
        # A link to a folder is among the folders, and is not followed.
        links = [each for each in inner if Path(parent, each).is_symlink()]
        for path in (Path(parent, each) for each in (*links, *names)):
            if not _is_left_behind(folder, path):
                return path.relative_to(folder).as_posix()
    return name if unreadable else None


def _is_left_behind(folder: Path, path: Path) -> bool:
    """Whether it is a file that a client of a hub leaves, and a harmless one if it is a pickle."""
    if not _LEFT_BEHIND.fullmatch(path.relative_to(folder).as_posix()):
        return False
    try:
        if path.name in _PICKLES:
            codes = pickletools.genops(files.read(path, _PICKLE_LIMIT))
            return {code.name for code, _, _ in codes} <= _PLAIN_OPCODES
        return files.size_of(path) is not None
    except (RotationZooError, ValueError):
        return False
