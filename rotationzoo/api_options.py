"""The options of the public functions, by keyword."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from rotationzoo.evaluation.harness.tasks import HarnessSettings
from rotationzoo.model.loading import RunOptions
from rotationzoo.progress import Progress


class Text(TypedDict, total=False):
    """The text that a model reads. Keys left out take the recipe's values."""

    data: str
    """A data set id, a `.jsonl`, `.txt` or `.parquet` file, or `bundled`."""
    tokens: int
    """Tokens in total."""
    length: int
    """Tokens per row."""
    seed: int
    """Sets the order of the documents."""
    subset: str
    split: str
    column: str
    packing: str


class Rows(RunOptions, total=False):
    """How rows of text run through a model."""

    batch: int
    """Rows per forward pass."""
    rope_scaling: str
    """Scale RoPE to more positions than the config has, as `yarn:4`."""


class CalibrationOptions(Text, Rows, total=False):
    """Further options of `calibrate`."""

    feedback: bool
    """Store, or leave out, what a cache needs to choose codes by error feedback. Without
    this option, the recipe decides."""
    restart: bool
    """Discard an existing checkpoint and replace an existing artifact."""
    progress: Progress
    """Called as `(stage, done, total)` while the job runs."""


class EvaluationOptions(Text, Rows, total=False):
    """Further options of `evaluate`."""

    tasks: Sequence[str]
    """Recall tasks, all by default: `needles`, `key-value`, `quote`, `copy`, `assignments`. An
    empty list asks nothing."""
    lengths: Sequence[int]
    """Tokens per prompt of the tasks. Defaults to `length`."""
    questions: int
    """Questions per task and length."""
    windows: list[tuple[int, int]]
    """Pairs `(sink, recent)`: how many first and last tokens stay exact. Defaults to the recipe's
    pair."""
    format: str
    """The engine's 2-bit format, such as `sglang` or `mlx`."""
    pooled: bool
    """Measure each artifact with one rotation per layer, too, as `export --pooled` writes it."""
    layers: set[int]
    """Quantize only these layers."""
    sides: tuple[str, ...]
    """The sides to quantize. `("key",)` or `("value",)` leaves the other side exact."""
    prefill_chunk: int
    prefill_layout: Literal["server", "window"]
    real_cache: bool
    """Read tasks through a cache that stores 2 bits, and not a simulation of it."""
    queries: int
    """Queries sampled per text for the attention KL; 0 skips it."""
    harness: HarnessSettings
    """Tasks of lm-evaluation-harness that the exact model and every arm answer."""
    progress: Progress
