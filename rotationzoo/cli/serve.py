"""`rotationzoo serve`: start a vLLM server whose cache is stored in 2 bits."""

import os
import shlex
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

from rotationzoo.cli import options
from rotationzoo.cli.options import argument, option
from rotationzoo.cli.output import SHELL, Output, show_lines


def serve_command(
    model: options.ModelName,
    rotations: Annotated[Path, option("The folder of rotations.")],
    out: Output,
    vllm_options: Annotated[
        list[str] | None, argument("Options of vllm serve.", metavar="OPTIONS")
    ] = None,
    format: Annotated[
        Literal["sglang", "vllm", "fine"] | None,
        option("How rows are stored (fine for a budget of bits, else vllm)."),
    ] = None,
    bits: options.Budget = None,
    rounding: options.Rounding = None,
    sink: options.Sink = None,
    recent: Annotated[int | None, option("Last tokens kept exact (the recipe's).", min=1)] = None,
    anyway: options.Anyway = False,
    revision: options.Revision = None,
    dry_run: Annotated[bool, option("Check everything, and print the line alone.")] = False,
) -> None:
    """Serve a model with vLLM, whose cache is stored in 2 bits. What follows the options here goes
    to vLLM.

    rotationzoo serve Qwen/Qwen3-8B --rotations rotations/Qwen3-8B-oscar --max-model-len 131072
    """
    handed_on = vllm_options or []
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.geometry import full_attention_layers
    from rotationzoo.model.compatibility import check_weights
    from rotationzoo.model.loading import load_config
    from rotationzoo.model.source import find, has_weights
    from rotationzoo.vllm import KEY
    from rotationzoo.vllm.command import read_command, server_command
    from rotationzoo.vllm.plugin import claim
    from rotationzoo.vllm.settings import Options, make_settings

    asked = Options(
        artifact=str(rotations.expanduser().absolute()),
        format=format,
        bits=bits,
        rounding=rounding,
        sink=sink,
        recent=recent,
    )
    source = find(model, revision)
    full = full_attention_layers(load_config(source))
    settings = make_settings(asked, source.name, source.folder, full is not None)
    artifact = Artifact.open(Path(asked.artifact))
    # A hub id stays what it is, because vLLM finds its files in the same cache.
    place = model if source.revision else str(source.folder)
    words = server_command(place, has_windows=full is not None)
    words += ["--revision", revision] if revision else []
    named = {KEY: asked.model_dump(exclude_none=True)}
    words += ["--additional-config", dumps(named)]
    notes = claim(read_command(words, handed_on))
    if has_weights(source):
        check_weights([artifact], source, anyway)
    if artifact.rotations.has_budget and not settings.codec.rotations.has_budget:
        out.note(
            "The budget of bits is left out: beside layers with a sliding window, all others have "
            "blocks of the same bytes"
        )
    if artifact.recipe.turns_mean("key"):
        out.note("The turned mean of keys is left out: only RotatedCache reads it so far")
    for note in notes:
        out.note(note)
    words += handed_on
    line = shlex.join(words)
    out.result({"command": words}, line, lambda: show_lines(line))
    if not dry_run:
        os.execvpe(words[0], words, SHELL)
