"""A cache layer with a sliding window: it forgets the tokens that no later query reads."""

from rotationzoo.cache.padding import Padding
from rotationzoo.cache.rotated_layer import RotatedLayer
from rotationzoo.cache.settings import Storage


class RotatedSlidingLayer(RotatedLayer):
    """The keys and values of one layer with a sliding window, or with chunks of attention."""

    is_sliding = True

    def __init__(self, storage: Storage, index: int, padding: Padding, window: int):
        super().__init__(storage, index, padding)
        self.sliding_window = window

    def _needed(self, length: int) -> int:
        # The next token is in its window itself.
        return max(0, length - self.sliding_window + 1)

    def get_max_length(self) -> int:
        """The window: a layer may forget earlier tokens."""
        return self.sliding_window
