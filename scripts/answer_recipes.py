"""The recipes that `benchmark_answers` compares, and which arms it asks most."""

from typing import Any

import yaml

from rotationzoo.recipe import PRESETS, Recipe, from_dict

_RECIPES = """
oscar-v1: {feedback: true}
oscar-v1-clip: {}
oscar: {feedback: true}
oscar centred: {extends: oscar, center_keys: true, feedback: true}
feedback: {}  # centred and equalized
hadamard: {feedback: true}
best: {}
oscar-clip: {}
hadamard-clip: {}
best-uncentered: {}
best by predictions: {extends: best, search: {prompts: 0}}
oscar-clip centred: {extends: oscar-clip, center_keys: true}
oscar-clip equalized: {extends: oscar-clip, equalize: true}
oscar-clip both: {extends: oscar-clip, center_keys: true, equalize: true}
hadamard-clip centred: {extends: hadamard-clip, center_keys: true}
hadamard-clip equalized: {extends: hadamard-clip, equalize: true}
hadamard-clip both: {extends: hadamard-clip, center_keys: true, equalize: true}
"""
BASE, CHOSEN, FEEDBACK = "oscar-v1-clip", "best", "+feedback"
BASELINES = ("identity", "random", "kivi-32", "kivi-64")
"""Arms without an artifact. `identity` and `random` have the clip ratios of `BASE`, where a run
has it."""
LIBRARIES = (
    "hqq-2", "hqq-4", "quanto-2", "quanto-4", "hqq-2-per-token", "quanto-2-per-channel",
)  # fmt: skip
"""transformers' own caches: names of `transformers_caches.CACHES`."""
_MAIN = (BASE, CHOSEN, "feedback", "oscar", "kivi-64")
ARMS = {
    "equal": (*_MAIN, "kivi-32", *LIBRARIES),
    "chunks": (*_MAIN, "hadamard-clip"),
    "8192": (*_MAIN, "hadamard-clip", "random"),
}
"""Setting -> the arms that it is about; any other setting has all of them but `LIBRARIES`."""
DEFAULT = (
    "oscar-v1", BASE, "oscar", "oscar centred", "feedback", "hadamard", CHOSEN, "oscar-clip",
    "hadamard-clip", "best-uncentered", *BASELINES,
)  # fmt: skip
MOST = (BASE, CHOSEN, CHOSEN + FEEDBACK, "feedback", "feedback" + FEEDBACK)
"""The arms that are asked every question. Outside the first setting of a run, error feedback is
measured for these alone."""


def recipes() -> dict[str, Recipe]:
    """Name -> recipe, in the order in which they are measured; all have the text of `best`."""
    table = {}
    for name, keys in yaml.safe_load(_RECIPES).items():
        content: dict[str, Any] = {"extends": name, **keys}
        content["data"] = PRESETS[CHOSEN].data.model_dump()
        table[name] = from_dict(content, name)
    return table
