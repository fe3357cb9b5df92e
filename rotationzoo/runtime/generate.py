"""The public function `generate`: `from rotationzoo import generate`."""

from typing import Any, Unpack

from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import UsageError
from rotationzoo.model.loading import RunOptions
from rotationzoo.progress import Progress, silent
from rotationzoo.runtime.generation import Generation, Sampling
from rotationzoo.runtime.job import generate as run_generation
from rotationzoo.runtime.options import CacheOptions
from rotationzoo.runtime.text_stream import Write
from rotationzoo.words import nearest


class GenerationOptions(CacheOptions, RunOptions, total=False):
    """Further options of `generate`, in addition to the options of the cache."""

    chat: bool
    """Put the prompt into the tokenizer's chat template, as a user's message."""
    max_new_tokens: int
    """256 by default."""
    temperature: float
    """Sample at this temperature. By default, each token is the most probable one."""
    top_p: float
    seed: int
    prefill_chunk: int
    """Tokens of the prompt that are read at a time, 2,048 by default."""
    compare: bool
    """Let the exact model continue the prompt, too."""
    write: Write
    """Called with each piece of the text as soon as it is written."""
    progress: Progress
    """Called as `(stage, done, total)` while the job runs."""


def generate(
    model: str,
    prompt: str,
    *,
    rotations: str | Artifact | None,
    **options: Unpack[GenerationOptions],
) -> dict[str, Any]:
    """Load a model and let it continue a prompt through a cache that stores 2 bits.

    * `model`: a hub id, a local folder, or `demo`;
    * `prompt`: the text to continue;
    * `rotations`: an artifact or its folder, a name in the zoo, which is pulled, or None for no
      rotation;
    * `options`: see `GenerationOptions`.

    Returns the report that `rotationzoo generate --json` prints: `text`, `tokens_per_second`,
    `cache_bytes` and `bf16_cache_bytes`, and with `compare` also `exact_text` and `parted_at`.
    The model is loaded for this one text; for several, load it yourself and give `RotatedCache` to
    its own `generate`. Raises `RotationZooError` where model, rotations and prompt do not fit
    together.
    """
    if unknown := options.keys() - GenerationOptions.__annotations__:
        name = min(unknown)
        raise UsageError(
            f"generate has no option {name!r}{nearest(name, GenerationOptions.__annotations__)}",
            hint="rotationzoo.runtime.generate.GenerationOptions lists them",
        )
    if not isinstance(prompt, str):
        raise UsageError(
            f"a prompt is a text, and not of type {type(prompt).__name__}",
            hint="for token ids, give the model's own generate a RotatedCache",
        )
    settings: dict[str, Any] = {**options}
    progress, write = settings.pop("progress", silent), settings.pop("write", None)
    cache: Any = _taken(settings, CacheOptions)
    sampling = Sampling(**_taken(settings, Sampling))
    job = Generation(model, prompt, rotations, sampling=sampling, cache=cache, **settings)
    return run_generation(job, progress, write)


def _taken(settings: dict[str, Any], kind: type) -> dict[str, Any]:
    """Take the settings that are fields of a type out of `settings`."""
    return {name: settings.pop(name) for name in kind.__annotations__ if name in settings}
