"""A 2-bit cache by the letter: it keeps every row exact, and at each call computes anew what a
query reads. `RotatedCache` is held against it."""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.windows import CacheLayout
from support.architectures import LAYERS


class NaiveLayer(DynamicLayer):
    """One layer with full attention, for rows without padding."""

    def __init__(self, arm: RotatedCodec, windows: CacheLayout, index: int = 0):
        super().__init__()
        self.arm, self.windows, self.index = arm, windows, index
        self.record_past = False
        self.exact_from = 0  # what was read quantized once stays so

    def activate_past_recording(self):
        self.record_past = True

    def update(self, key_states, value_states, *args, **kwargs):
        begin, new = self.get_seq_length(), key_states.shape[2]
        keys, values = super().update(key_states, value_states)
        windows = self.windows
        if new == 1 or self.record_past:
            exact_from = begin + 1 - windows.recent
        elif windows.prefill_layout == "server":
            exact_from = begin
        else:
            exact_from = begin - windows.recent
        group = self.arm.token_group
        complete = max(0, exact_from - windows.sink) // group * group
        self.exact_from = max(self.exact_from, windows.sink + complete)
        if not self.record_past:
            left = max(0, begin + new - windows.recent - windows.sink) // group * group
            self.after = windows.sink + left
        read = self._mix(keys, "key"), self._mix(values, "value")
        if not self.record_past:
            self.exact_from = max(self.exact_from, self.after)
        return read

    def _mix(self, rows, side):
        sink = self.windows.sink
        exact = self.arm.keep_exact(rows, self.index, side)
        past = rows[:, :, sink:]
        stored = self.arm.fake_quantize(past, self.index, side, self.windows.format)
        position = torch.arange(rows.shape[2])
        is_exact = (position < sink) | (position >= self.exact_from)
        quantized = torch.cat([exact[:, :, :sink], stored], dim=2)
        return torch.where(is_exact[:, None], exact, quantized)


def naive_cache(arm: RotatedCodec, windows: CacheLayout) -> DynamicCache:
    """A cache of such layers for a tiny model of `architectures`."""
    cache = DynamicCache()
    cache.layers = [NaiveLayer(arm, windows, index) for index in range(LAYERS)]
    cache.layer_class_to_replicate = None
    return cache
