"""The main loop of a calibration: batches of token rows -> second moments of the attention's inputs
and outputs. Under torchrun, each process adds up its share of the text, and the sums of all are
added.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import torch
from transformers import PreTrainedModel

from rotationzoo import ranks
from rotationzoo.calibration.checkpoint import Checkpoint
from rotationzoo.calibration.observers import KeyEnergyObserver, MomentObserver
from rotationzoo.calibration.running_sums import RunningSums
from rotationzoo.errors import RotationZooError, UnsupportedModel
from rotationzoo.linalg.moments import Moment, Statistics
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.geometry import Geometry
from rotationzoo.model.loading import input_device
from rotationzoo.model.out_of_memory import RowLimit
from rotationzoo.progress import Progress, in_tokens, silent
from rotationzoo.recipe import Recipe
from rotationzoo.text.rows import Corpus

_TOGETHER = 16  # layers whose sums are sent at once: few waits for others, and small copies


def sum_over_ranks(statistics: Statistics, kinds: Sequence[str] | None = None) -> Statistics:
    """The sums over all processes, of all kinds or of some. A process that is alone gets its
    statistics as they are.

    Every process calls this with the same layers and kinds. Float64 sums of other parts differ by
    rounding, so the result depends that much on how many processes there are.
    """
    if ranks.world() == 1:
        return statistics
    totals: Statistics = {}
    # Sorted, because sums that were read from a checkpoint come in another order.
    layers = sorted(statistics)
    for start in range(0, len(layers), _TOGETHER):
        group = layers[start : start + _TOGETHER]
        totals |= _sum_layers({layer: statistics[layer] for layer in group}, kinds)
    return totals


def _sum_layers(statistics: Statistics, kinds: Sequence[str] | None) -> Statistics:
    """The totals of some layers, sent as one tensor."""
    wanted = [(layer, kind) for layer in statistics for kind in sorted(kinds or statistics[layer])]
    tensors = []
    for layer, kind in wanted:
        moment = statistics[layer][kind]
        tensors += [getattr(moment, field.name) for field in fields(Moment)]
    # A process without text still has its zeros where they were made.
    device = tensors[0].device
    total = ranks.all_reduce(torch.cat([tensor.to(device).flatten() for tensor in tensors]))
    pieces = total.split([tensor.numel() for tensor in tensors])
    sums = [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
    totals: Statistics = {layer: {} for layer in statistics}
    for number, (layer, kind) in enumerate(wanted):
        first = number * len(fields(Moment))
        totals[layer][kind] = Moment(*sums[first : first + len(fields(Moment))])
    return totals


def notes_of_idle(text: Corpus, batch: int) -> list[str]:
    """A note if some processes get none of the text's batches of so many rows, with what would give
    each of them one."""
    processes, batches = ranks.world(), len(text.batches(batch))
    if batches >= processes:
        return []
    smaller = (size for size in range(batch - 1, 0, -1) if len(text.batches(size)) >= processes)
    size = next(smaller, None)
    advice = "more --tokens" if size is None else f"--batch {size}"
    idle = processes - batches
    return [
        f"{idle} of {processes} processes had nothing to do: {advice} would give each of them a "
        "batch"
    ]


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    geometry: Geometry,
    batches: list[torch.Tensor],
    recipe: Recipe,
    checkpoint: Checkpoint | None = None,
    progress: Progress = silent,
) -> Statistics:
    """Collect the second moments that a recipe needs, for each cached layer and KV head.

    - `batches`: token ids `[B, T]`. Processes that `ranks` joins take turns in taking one; each
      returns the sums of all of them.
    - `checkpoint`: where the sums of whole batches of this process are saved now and then, and if
      it is interrupted, and from which its earlier sums of the same job are read.
    - `progress`: called with "calibrating" and the tokens read, at first and after every batch.

    Queries and outputs count at every position, towards the layer that owns the cache they read.
    Keys and values count from position `sink` on if the recipe excludes the sink. `key_energy`
    takes a second pass over the same rows, because its weights depend on the queries of all of
    them.

    A batch that runs out of memory is halved, and so are those that follow, also after a resume:
    the `limit` of the checkpoint says how many rows were left. Raises `RotationZooError` where a
    single row is too large, and in one of several processes.

    Raises `UnsupportedModel` if the hooks miss a layer or a token, and `RotationZooError`, naming
    the layer, if an activation is not finite.
    """
    passes = 2 if recipe.value_statistic == "key_energy" else 1
    sums = RunningSums(geometry, recipe, checkpoint, input_device(model))
    # The sink stays exact in the cache, so its outliers need not shape the rotations.
    skip = recipe.sink if recipe.exclude_sink else 0
    limit = RowLimit() if checkpoint is None else checkpoint.limit
    shared = ranks.share(batches)
    progress = in_tokens(progress, [ids.numel() for ids in shared] * passes)
    progress("calibrating", sums.done, passes * len(shared))
    observer = MomentObserver(geometry, sums.batch, skip)
    with sums.saved_if_interrupted():
        for number in range(passes):
            if number == 1:
                # It needs the finished query moments of the first pass, also after a resume.
                queries = sum_over_ranks(sums.whole, ["query"])
                observer = KeyEnergyObserver(geometry, sums.batch, skip, queries)
            forward = partial(_observe, model, observer)
            first = number * len(shared)
            for ids in shared[max(sums.done - first, 0) :]:
                limit.run(ids, forward, sums.keep_batch)
                sums.finish_batch(observer.kinds)
                progress("calibrating", sums.done, passes * len(shared))
                ranks.beat()
            if ranks.world() > 1:
                sums.save()  # other processes may take long
        totals = sum_over_ranks(sums.whole)
    _check_counts(totals, geometry, batches, skip)
    return totals


def _observe(model: PreTrainedModel, observer: MomentObserver, ids: torch.Tensor) -> None:
    """Run the decoder on rows `[B, T]` while the observer adds up what its attention reads."""
    with capture(model, observer):
        decoder(model)(input_ids=ids.to(input_device(model)), use_cache=False)


def _check_counts(
    statistics: Statistics, geometry: Geometry, batches: list[torch.Tensor], skip: int
) -> None:
    """Raise `UnsupportedModel` unless the hooks saw every token in every layer exactly once, and
    `RotationZooError` if no row is longer than the sink."""
    tokens = sum(ids.numel() for ids in batches)
    past_sink = sum(ids.shape[0] * max(ids.shape[1] - skip, 0) for ids in batches)
    if not past_sink:
        raise RotationZooError(
            f"no row is longer than the {skip} sink tokens that are left out of the key and value "
            "sums",
            hint="give longer rows with --length, or longer documents",
        )
    for owner, moments in statistics.items():
        readers = [layer for layer in geometry if layer.owner == owner]
        # The query heads of a group count separately, and so do the layers that share a cache.
        queries = tokens * sum(layer.group for layer in readers)
        expected = {"query": queries, "output": queries, "key": past_sink, "value": past_sink}
        for kind, count in expected.items():
            weight = moments[kind].weight
            if not (weight == count).all():
                raise UnsupportedModel(
                    f"the hooks saw {int(weight[0])} {kind} rows of layer {owner} "
                    f"instead of {count}"
                )
