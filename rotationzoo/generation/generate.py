"""The generation job: from the names of a model and an artifact and a prompt to a text, written
through a 2-bit cache, and what the cache took."""

import shlex
from contextlib import suppress
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

from rotationzoo.artifact.manifest import ROTATIONS, hash_config
from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.options import build_settings
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.codec.settings import as_engine
from rotationzoo.engines.reductions import describe_choice
from rotationzoo.errors import HubError, RotationZooError, UsageError
from rotationzoo.evaluation.compatibility import rope_notes
from rotationzoo.generation import continuation
from rotationzoo.generation.continuation import Generation, TextStream, Write
from rotationzoo.generation.prompt import Prompt, encode_prompt, write_example
from rotationzoo.geometry import check_group_size, head_dims
from rotationzoo.model import compatibility, loading
from rotationzoo.model.geometry import geometry_on_meta
from rotationzoo.model.placement import place_weights
from rotationzoo.model.quantized import check_loadable
from rotationzoo.model.source import Source, fetch, fetch_weights, find
from rotationzoo.progress import Progress, Tokens, silent
from rotationzoo.recipe import Recipe
from rotationzoo.recipe.rope import position_count, scaling_of
from rotationzoo.text.rows import start_note
from rotationzoo.writer import is_remembered
from rotationzoo.zoo.pull import pull


def generate(
    job: Generation,
    progress: Progress = silent,
    write: Write | None = None,
    note: Write = lambda text: None,
) -> dict[str, Any]:
    """Continue a prompt through a 2-bit cache, and return the report that `generate --json` prints.

    `write` gets the text piece by piece; without it, `progress` is told of the tokens. `note` gets
    what a reader should know of the rotations. Raises `UsageError` for settings that exclude each
    other or a prompt that the model has no positions for, and `RotationZooError` for rotations that
    do not fit the model, before any weights are fetched where the config is enough to tell.
    """
    job.check()
    device = job.torch_device
    artifact = _open(job, progress)
    progress("looking at the model", 0, 0)
    source = find(job.model, job.revision)
    artifacts = [artifact] if artifact else []
    scaling = compatibility.settle_rope_scaling(job.rope_scaling, artifacts, source)
    config = loading.load_config(source, scaling)
    check_loadable(config, source.name, device)
    geometry = geometry_on_meta(loading.on_meta(config, source.name))
    if geometry is not None:
        compatibility.check_artifacts(job.model, artifacts, geometry)
        check_group_size(job.cache.get("group_size"), head_dims(geometry))
    fetch(source, weights=False)
    tokenizer = loading.load_tokenizer(source)
    has_budget = any(each.rotations.has_budget for each in artifacts)
    options = as_engine(job.cache, has_budget)
    recipe = artifact.recipe if artifact else Recipe()
    sink, recent = options.get("sink", recipe.sink), options.get("recent", recipe.recent)
    if job.prompt is None:
        prompt = write_example(tokenizer, sink, recent, job.max_new_tokens)
    else:
        if not job.chat and (said := start_note(tokenizer)):
            note(said)
        positions = position_count(config)
        ids = encode_prompt(job.prompt, tokenizer, job.model, job.chat, positions)
        prompt = Prompt(ids, job.max_new_tokens or continuation.MAX_NEW_TOKENS)
    prompt.check_positions(job.model, config)
    loading.check_ids([prompt.ids], config, job.model)
    fetch_weights(source, progress)
    compatibility.check_weights(artifacts, source, job.anyway)
    notes = []
    if "engine" in job.cache:
        notes.append(describe_choice(options["engine"], artifacts, job.cache))
    notes += filter(None, [compatibility.other_weights_note(each, source) for each in artifacts])
    notes += rope_notes(artifacts, scaling)
    for text in notes:
        note(text)
    with place_weights(job.device_map, job.max_memory) as placement:
        progress("loading the model", 0, 0)
        dtype = job.torch_dtype
        model = loading.load(source, config, device, dtype, placement)
        for text in loading.notes_of(model):
            note(text)
        # Other weights are a note of the report, and need not be logged by the public class.
        cache = RotatedCache(build_settings(artifact, model, job.cache), model)
        counting = partial(_counting, progress, total=prompt.max_new_tokens)
        shown = _after(prompt.question, write) if write else counting("writing")
        written = TextStream(tokenizer, prompt.ids, shown)
        continuation.continue_prompt(model, prompt, job, written, progress, cache)
        sizes = {"cache_bytes": cache.bytes_held, "bf16_cache_bytes": cache.bytes_in_bf16}
        del cache  # the exact model's own needs more room
        exact = None
        if job.compare and written.stop != continuation.INTERRUPTED:
            shown = counting("writing with the exact model")
            exact = TextStream(tokenizer, prompt.ids, shown)
            continuation.continue_prompt(model, prompt, job, exact, progress)
    report = {
        "model": source.label,
        "revision": source.revision,
        "rotations": str(artifact.folder) if artifact else None,
        "notes": notes,
        "rope_scaling": scaling_of(config),
        "format": options["format"],
        "sink": sink,
        "recent": recent,
        **sizes,
        **continuation.describe_text(prompt, written),
    }
    if exact is not None:
        report |= continuation.compare_texts(written, exact)
    return report


def _counting(progress: Progress, stage: str, total: int) -> Write:
    """A writer that reports each piece of text, usually a token, as progress."""
    pieces = count(1)
    return lambda text: progress(stage, Tokens(next(pieces)), Tokens(total))


def _after(question: str, write: Write) -> Write:
    """Write the line that a text completes before it."""
    beginnings = chain([question], repeat(""))
    return lambda text: write(next(beginnings) + text)


def _open(job: Generation, progress: Progress) -> Artifact | None:
    if job.rotations is None or isinstance(job.rotations, Artifact):
        artifact = job.rotations
    else:
        progress("opening the rotations", 0, 0)
        artifact = open_artifact(job.rotations)
    feedback = job.cache.get("rounding") == "feedback"
    if feedback and (artifact is None or not artifact.rotations.has_feedback):
        name = artifact.folder if artifact else "a cache without rotations"
        raise RotationZooError(
            f"{name} has no factors to choose codes by error feedback with",
            hint="calibrate with --feedback, or leave out --rounding",
        )
    return artifact


def newest_artifact(folder: Path, source: Source) -> tuple[Artifact, int]:
    """The newest of the artifacts in `folder` that this user made or pulled for this model, and how
    many there are. Raises `UsageError`, with the next command, where there is none."""
    artifact, count = find_artifact(folder, source)
    if artifact is not None:
        return artifact, count
    words = shlex.quote(source.name)
    hint = f"make one with: rotationzoo calibrate {words}"
    if source.revision is not None:  # a model of a hub, for which the zoo may have rotations
        hint = f"pull one of the zoo by adding: --rotations {words}; or {hint}"
    raise UsageError(f"there are no rotations of {source.name} in the folder {folder}", hint=hint)


def find_artifact(folder: Path, source: Source) -> tuple[Artifact | None, int]:
    """The newest of the artifacts in `folder` that this user made or pulled for this model, and how
    many there are: an archive or a repository may hold a folder of others. Raises `UsageError`
    where all that fit the model are others'."""
    fitting, expected = [], hash_config(source.folder)
    for manifest in sorted(folder.glob("*/manifest.json")):
        with suppress(RotationZooError):
            artifact = Artifact.open(manifest.parent)
            if artifact.manifest.model.config_sha256 == expected:
                fitting.append(artifact)
    trusted = [each for each in fitting if is_remembered(each)]
    if trusted:
        # The rotations, and not the manifest, which `evaluate --save` writes again.
        newest = max(trusted, key=lambda each: (each.folder / ROTATIONS).stat().st_mtime_ns)
        return newest, len(trusted)
    if fitting:
        place = fitting[0].folder
        raise UsageError(
            f"{place} is nothing that you calibrated or pulled on this machine",
            hint=f"if you know whose it is, add: --rotations {shlex.quote(str(place))}",
        )
    return None, 0


def open_artifact(given: str | Path) -> Artifact:
    """The artifact in a folder, or that of a name in the zoo, which is pulled. Raises
    `RotationZooError` where there is none."""
    if _is_path(given):
        return Artifact.open(Path(given).expanduser())
    try:
        return pull(str(given))
    except HubError as error:
        raise HubError(
            f"{given} is no folder, and pulling it from the zoo fails: {error}",
            hint="check the spelling and the network, or give a folder",
        ) from error


def _is_path(given: str | Path) -> bool:
    """Whether this names a folder of this machine, even one that is missing, and not an entry of
    the zoo: a user who mistypes a folder should not be told about a hub."""
    path = Path(given).expanduser()
    if path.exists() or path.is_absolute() or isinstance(given, Path) or given.startswith("."):
        return True
    # Where `calibrate` puts artifacts, or has put others.
    in_rotations = path.parts[:1] == ("rotations",)
    return len(path.parts) > 1 and (in_rotations or any(path.parent.glob("*/manifest.json")))
