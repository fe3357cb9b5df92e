"""Rows stored by transform coding on an NVIDIA GPU, as `transform.SegmentLayout` defines it, in the
pages of a server or of a cache. Nothing waits for the GPU until `SegmentEncoder.check`."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from rotationzoo.codec import int2
from rotationzoo.codec.cuda import Launcher, Variant, build, run_beside
from rotationzoo.codec.cuda_encoder import kernels_run_on, supports
from rotationzoo.codec.kernels.parameters import IntoPages, StoreSegments
from rotationzoo.codec.transform import SegmentLayout, list_scales

FEW = 2000
"""The most rows of a side that get a block each. Measured with an earlier kernel."""
SPREAD = 256
"""The most rows of channels that get a block each: about two for a multiprocessor."""
_WARPS = 4  # rows of a block: `WARPS` in `int2.cu`
_TRYING = 16  # warps of a block for one row: `TRYING` in the source
_LARGEST_DIM = 256  # a block of few has 4 threads a channel


@cache
def compiled(name: str, dim: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Any:
    """A kernel of `segments.cu` for these rows, and pages of `tokens` tokens."""
    macros = (*Variant(dim, dim, dtype).macros(), ("TOKENS", str(tokens)))
    kernel = build("segments.cu", macros, device).get_kernel(name)
    run_beside(kernel, device)
    return kernel


def store_many(
    channels: torch.Tensor,
    pages: torch.Tensor,
    places: torch.Tensor,
    page_bytes: int,
    into: IntoPages,
    kernel: Any,
) -> None:
    """Write channels in steps `[H, T, D]`, float32, to their `places` in `pages`, int64 `[T]`."""
    (heads, tokens, _), scales = channels.shape, list_scales(channels.device)
    few = int(heads * tokens <= SPREAD)
    arguments = StoreSegments(channels, tokens, few, pages, places, page_bytes, scales, into)
    rows, warps = (1, _TRYING) if few else (_WARPS, _WARPS)
    grid = -(-tokens // rows), heads, 1
    Launcher(channels.device)(kernel, grid, 32 * warps, arguments, early=False)


class SegmentEncoder:
    """Encodes rows of one side of a layer."""

    def __init__(self, layout: SegmentLayout, steps: torch.Tensor):
        """`steps`: `[H, D]`, on a GPU."""
        self.layout, self.steps = layout, steps
        self.bad = torch.zeros(2, dtype=torch.int64, device=steps.device)

    def __call__(self, channels: torch.Tensor) -> list[torch.Tensor]:
        """The rows `[B, 1, T, row bytes]` of each head, from channels in steps `[B, H, T, D]`."""
        batch, _, tokens, dim = channels.shape
        device, layout = channels.device, replace(self.layout, tokens=tokens)
        memory = layout.empty(batch + 1, device)  # page 0 belongs to nobody
        if tokens:
            number = torch.arange(batch * tokens, device=device)
            pages = number // tokens + 1, number % tokens, layout.bytes
            into = IntoPages(self.steps, layout.places(device), memory, self.bad)
            rows = channels.float().transpose(0, 1).flatten(1, 2).contiguous()
            kernel = compiled("store_segments", dim, 1, torch.float32, device)
            store_many(rows, *pages, into, kernel)
        return layout.view(memory[1:])

    def check(self) -> None:
        """Wait for the GPU; raise `RotationZooError` if it refused a row since the last call."""
        if self.bad[0].item():
            self.bad.zero_()
            raise int2.refusal()


def make_encoder(layout: SegmentLayout, steps: torch.Tensor) -> SegmentEncoder | None:
    """An encoder for rows on the device of these steps `[H, D]`; None without a kernel."""
    is_known = supports(Variant(layout.dim, layout.dim, torch.float32))
    if is_known and layout.dim <= _LARGEST_DIM and kernels_run_on(steps.device):
        return SegmentEncoder(layout, steps)
    return None
