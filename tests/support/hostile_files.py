"""Rotation files as somebody who means harm would write them."""

import struct
from pathlib import Path

import pytest
import torch

from rotationzoo.errors import RotationZooError


def refused(function, *arguments) -> str:
    """The one sentence that a hostile file ends with."""
    with pytest.raises(RotationZooError) as error:
        function(*arguments)
    words = str(error.value)
    assert "\n" not in words
    assert len(words) < 400
    return words


def entry(**changes) -> dict:
    return {"layer_id": 0, "rotation": torch.eye(64), **changes}


def torch_file(path: Path, layers: dict, **top) -> Path:
    content = {
        "format_version": 1,
        "objective": "qqt_r_h_pbr",
        "source_grouping": "layer",
        **top,
        "layers": layers,
    }
    torch.save(content, path)
    return path


def gguf_bytes(*, fields: int = 0, tensors: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, fields) + body


def gguf_field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def gguf_tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    words = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape) % 2**32)
    return words + b"".join(struct.pack("<Q", n) for n in shape) + struct.pack("<IQ", kind, offset)
