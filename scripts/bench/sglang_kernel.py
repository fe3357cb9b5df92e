"""SGLang's Triton decode attention from its one source file, without the rest of SGLang."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_MODULES = (
    "sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.environ", "sglang.kernels",
    "sglang.kernels.ops", "sglang.kernels.ops.attention", "sglang.kernels.ops.attention.score_mod",
)  # fmt: skip


class _Absent(ModuleType):
    """A module of SGLang that only other GPUs or options need: its functions return False."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "unpack_aux_tensors":  # of a modification of scores, and there is none
            return lambda *_: (None, 0, 0, 0)
        return lambda *_, **__: False


def load_sglang(path: Path) -> ModuleType:
    """The module of `decode_attention.py`. Written for that of SGLang 0.5.23, in
    `sglang/kernels/ops/attention`."""
    for name in _MODULES:
        absent = _Absent(name)
        absent.__path__ = []
        sys.modules.setdefault(name, absent)
    spec = importlib.util.spec_from_file_location("sglang_decode_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class SglangDecode:
    """SGLang's kernel on caches `[tokens of all requests, H, D]`, with buffers allocated once, as
    in its server."""

    def __init__(self, module: ModuleType, batch: int, context: int, heads: int, splits: int):
        self.attention, self.splits = module.decode_attention_fwd, splits
        device = "cuda" if torch.cuda.is_available() else "cpu"
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.starts = starts * context
        self.indices = torch.arange(batch * context, device=device)
        self.split_counts = torch.full((batch,), splits, dtype=torch.int32, device=device)
        self.batch, self.heads = batch, heads

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The output `[B, H_q, D]` of queries `[B, H_q, D]`."""
        size = self.batch, self.heads, self.splits
        partial = query.new_empty(*size, value.shape[-1], dtype=torch.float32)
        logits = query.new_empty(size, dtype=torch.float32)
        output = torch.empty_like(query)
        scale = query.shape[-1] ** -0.5
        self.attention(
            query, key, value, output, self.starts, self.indices, partial, logits,
            self.split_counts, self.splits, scale, 1.0, 1.0,
        )  # fmt: skip
        return output
