"""`rotationzoo serve`: start a vLLM server whose cache is stored in 2 bits."""

import os
import shlex
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rotationzoo.cli.next_steps import named, shell_line, typed_words
from rotationzoo.cli.output import SHELL, Output, show_lines
from rotationzoo.codec.options import Bits, Sink
from rotationzoo.errors import HubError, RotationZooError, UsageError
from rotationzoo.settings import CalibrationSettings, ModelName, Revision, RopeScaling
from rotationzoo.settings_base import argument, flag, option

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.model.source import Source

ENGINE = "vllm"


def serve_command(
    model: ModelName,
    out: Output,
    rotations: Path | None = option("Their folder (found in rotations/, pulled or calibrated)."),
    vllm_options: list[str] | None = argument("Options of vllm serve.", None, metavar="OPTIONS"),
    format: Literal["sglang", "vllm", "segments"] | None = option(
        "How rows are stored (segments for a budget of bits, otherwise vllm)."
    ),
    bits: Bits = None,
    sink: Sink = None,
    recent: int | None = option("Last tokens kept exact (the recipe's).", min=1),
    anyway: bool = flag("Also take other weights' rotations, and a newer vLLM that lacks names."),
    revision: Revision = None,
    rope_scaling: RopeScaling = None,
    dry_run: bool = flag("Check everything, and only print the command."),
) -> None:
    """Serve a model with vLLM and a 2-bit cache. Options that are not listed here go to vLLM.

    rotationzoo serve Qwen/Qwen3-8B

    rotationzoo serve Qwen/Qwen3-8B --rotations rotations/Qwen3-8B-transform --max-model-len 131072
    """
    handed_on = vllm_options or []
    if rotations is None and handed_on and (Path(handed_on[0]) / "manifest.json").exists():
        hint = "write it as: rotationzoo serve MODEL --rotations FOLDER"
        raise UsageError(f"{handed_on[0]} has rotations, and no option names it", hint)
    from rotationzoo.artifact.manifest import hash_config
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.geometry import full_attention_layers, shares_blocks
    from rotationzoo.model.compatibility import check_weights, settle_rope_scaling
    from rotationzoo.model.files import check_engine
    from rotationzoo.model.loading import load_config
    from rotationzoo.model.source import find, has_weights
    from rotationzoo.recipe.rope import position_count, scaling_of
    from rotationzoo.vllm import KEY
    from rotationzoo.vllm.command import read_command, read_options, server_command
    from rotationzoo.vllm.plugin import choose_package, claim
    from rotationzoo.vllm.refusals import check_latents
    from rotationzoo.vllm.settings import Options, make_settings

    source = find(model, revision)
    check_engine(source.folder, ENGINE)
    scaling = settle_rope_scaling(rope_scaling, [], source)
    config = load_config(source, scaling)
    has_others, has_windows = shares_blocks(config), full_attention_layers(config) is not None
    # vLLM finds the files of a hub id in the same cache.
    place = model if source.revision else str(source.folder)
    package, missing = choose_package(anyway)
    if missing:
        missing.hint = f"{missing.hint} && {shell_line(*typed_words())}"
    check_latents(config)
    words = server_command(package, place, has_windows)
    if not missing:
        read_options(words, handed_on)  # for its error, before anything is calibrated
    if rotations is None:
        rotations = _find_rotations(out, source, scaling, dry_run, missing).folder
    asked = Options(
        artifact=str(rotations.expanduser().absolute()),
        format=format,
        bits=bits,
        sink=sink,
        recent=recent,
        anyway=anyway or None,
    )
    settings = make_settings(asked, source.name, source.folder, has_others)
    artifact = Artifact.open(Path(asked.artifact))
    words += ["--revision", revision] if revision else []
    scaling = settle_rope_scaling(scaling, [artifact], source)
    text = load_config(source, scaling).get_text_config(decoder=True)
    overrides = {"rope_parameters": text.rope_parameters} if scaling else {}
    if str(scaling_of(text)).startswith("yarn:"):  # vLLM takes the positions that are stated
        overrides["max_position_embeddings"] = position_count(text)
    words += ["--hf-overrides", dumps(overrides)] if overrides else []
    words += ["--additional-config", dumps({KEY: asked.model_dump(exclude_none=True)})]
    notes = [] if missing else claim(read_command(words, handed_on))
    # Quantized weights differ from the original ones.
    if has_weights(source) and artifact.manifest.model.config_sha256 == hash_config(source.folder):
        check_weights([artifact], source, anyway)
    if has_others and settings.codec.rotations.has_budget:
        out.note("Next to layers of other kinds, all 2-bit layers get the same bits of the budget")
    for note in notes:
        out.note(note)
    words += handed_on
    line = shlex.join(words)
    out.result({"command": words}, line, lambda: show_lines(line))
    if missing:  # after the line, which works where vLLM is installed
        raise missing
    if not dry_run:
        os.execvpe(words[0], words, SHELL)


def _find_rotations(
    out: Output,
    source: "Source",
    scaling: str | None,
    dry_run: bool,
    missing: RotationZooError | None,
) -> "Artifact":
    """The user's newest artifact for a model with this scaling of RoPE; or the published one that
    keeps most for vLLM; or, unless this is a `dry_run`, a new one. Raises `missing` before anything
    is fetched, and `HubError` for a hub that fails."""
    from rotationzoo.api import calibration_job
    from rotationzoo.cli.calibrate import run_job
    from rotationzoo.cli.generate import find_rotations, no_rotations
    from rotationzoo.model.loading import load_config
    from rotationzoo.recipe.rope import scaling_of

    def fits(calibrated: str | None) -> bool:
        made, runs = (scaling_of(load_config(source, each)) for each in (calibrated, scaling))
        return made == runs

    if artifact := find_rotations(out, source, fits):
        return artifact
    if missing:
        raise missing
    try:
        artifact = _pull(out, source, scaling, fits) if source.revision else None
    except HubError as error:
        make = shell_line("calibrate", *named(source.name, None, scaling))
        hint = f"run it again, or make rotations with: {make}"
        raise HubError(f"published rotations cannot be fetched: {error}", hint) from error
    if artifact:
        return artifact
    if dry_run:
        raise no_rotations(source)
    asked = CalibrationSettings(
        source.name, engine=ENGINE, revision=source.revision, rope_scaling=scaling
    )
    job = calibration_job(asked)
    out.note(f"Rotations: none here and none published; calibrating to {job.output}")
    return run_job(out, job)


def _pull(
    out: Output, source: "Source", scaling: str | None, fits: Callable[[str | None], bool]
) -> "Artifact | None":
    """The best published artifact for this model and scaling of RoPE, or None."""
    from rotationzoo.cli.progress_bar import show_progress
    from rotationzoo.zoo.hubs.protocol import HUB_NAMES
    from rotationzoo.zoo.lookup import choose_entry, find_index
    from rotationzoo.zoo.pull import pull_first
    from rotationzoo.zoo.signed_index import check_index
    from rotationzoo.zoo.signing import Demand

    index, hubs = find_index(None, None), list(HUB_NAMES)
    check_index(index, Demand())
    wanted = source.name, source.revision, None, hubs, scaling, ENGINE
    try:
        entry, copies, why = choose_entry(index, *wanted)
        is_fitting = fits(entry.rope_scaling)
    except RotationZooError:  # there is none for this model, or this scaling
        return None
    if entry.format != "rotationzoo" or not is_fitting:
        out.note(f"The published rotations do not fit: {why}")
        return None
    with show_progress(out) as progress:
        pulled = pull_first(index, entry, copies, progress=progress)
    place = f"{pulled.copy.repo} on {pulled.copy.hub}"
    out.note(f"Rotations: pulled to {pulled.path}: {why}, from {place}")
    out.notes([pulled.signature.note] if pulled.signature else [])
    return pulled.artifact
