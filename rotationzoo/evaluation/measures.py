"""The types of the figures that `evaluate` reports of texts, which are keys of its JSON."""

from typing import TypedDict

# These types are the JSON of `evaluate`. Other programs rely on their keys and on the order.
Range = TypedDict("Range", {"from": int, "to": int})
"""The positions of a bucket: the first, and the one after the last."""


class StandardErrors(TypedDict):
    """Standard errors over texts; None if there is only one text."""

    perplexity_increase: float | None
    attention_kl: float | None
    output_error: float | None


class Measures(TypedDict):
    """What one arm costs the model."""

    perplexity: float
    perplexity_increase: float
    """The relative increase over the exact model on the same tokens."""
    attention_kl: float | None
    """In nats, averaged over layers, heads and sampled queries; None if none were sampled."""
    output_error: float
    """Relative RMS error of the attention block's output, averaged over layers."""
    standard_error: StandardErrors


class BucketMeasures(Range, Measures):
    """The same measures, restricted to the context lengths of one bucket."""


class HeadMeasures(TypedDict):
    """The measures of one layer over all texts, one number per KV head in order; None where nothing
    was measured."""

    attention_kl: list[float | None]
    """In nats, averaged over the query heads that read the KV head, and over sampled queries."""
    output_error: list[float | None]
    """Relative RMS error of the attention outputs of the query heads that read the KV head, before
    the output projection: the layer's own is measured behind it."""
    key_row_range: list[float | None]
    """`(max - min) / rms` of a key row, averaged over all rows past the sink, in the coordinates in
    which it is rounded. None for keys that are not rounded, or not row by row."""
    value_row_range: list[float | None]
    """The same of values."""


class LayerMeasures(TypedDict):
    """The measures of one layer over all texts."""

    layer: int
    output_error: float
    attention_kl: float | None
    heads: HeadMeasures


class ArmMeasures(Measures):
    """Everything that is measured of one arm with one cache."""

    by_length: list[BucketMeasures]
    by_layer: list[LayerMeasures]
    text_losses: list[float]


class RangePerplexity(Range):
    """The exact model's perplexity at the context lengths of one bucket."""

    perplexity: float


class ExactMeasures(TypedDict):
    """Everything that is measured of the model without a 2-bit cache."""

    text_tokens: list[int]
    perplexity: float
    by_length: list[RangePerplexity]
    text_losses: list[float]
