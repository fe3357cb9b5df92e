"""`rotationzoo export`: write the files that a serving engine reads."""

from pathlib import Path
from typing import TYPE_CHECKING

from rotationzoo.cli.output import Output, show_lines
from rotationzoo.codec.engine_needs import ENGINE_NAMES, EngineName
from rotationzoo.errors import UsageError
from rotationzoo.settings import ArtifactFolder, Clip, Windows
from rotationzoo.settings_base import flag, option
from rotationzoo.storage.folders import follow_link

if TYPE_CHECKING:
    from rotationzoo.engines.export import Exported

CHOICES = "|".join(ENGINE_NAMES)  # in brackets, they are too wide for a terminal


def export_command(
    artifact: ArtifactFolder,
    out: Output,
    to: EngineName | None = option("The engine.", "--for", "--to", metavar=CHOICES),
    output: Path | None = option("Folder (ROTATIONS-ENGINE in exports).", "--output", "-o"),
    pooled: bool = flag("One rotation per layer, fitted from the pooled statistics."),
    uncentered: bool = flag("Leave the means of keys and values out."),
    clip: Clip = None,
    windows: Windows = None,
    base: Path | None = option("llama.cpp: the GGUF file that is copied and added to."),
) -> None:
    """Write the files that a serving engine reads, and print how to start it.

    rotationzoo export rotations/Qwen3-8B-transform --for sglang

    rotationzoo export rotations/Qwen3-8B-transform --for llama.cpp --base Qwen3-8B-Q8_0.gguf
    """
    if to is None:
        hint = "name it: --for vllm, or --for sglang"
        raise UsageError("export writes what one engine reads", hint)
    from rotationzoo.artifact.reductions import Request
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.engines.export import export

    opened = Artifact.open(artifact)
    request = Request(
        engine=to,
        output=follow_link(output),
        pooled=pooled,
        uncentered=uncentered,
        clip=clip,
        windows=windows,
        base=base,
    )
    if to != "llama.cpp" and base:
        raise UsageError("--base is for llama.cpp", hint="--for llama.cpp")
    exported = export(opened, request)
    if opened.manifest.metrics.evaluation is None:
        out.note("Note: these rotations were not evaluated yet: rotationzoo evaluate does that")
    show_export(out, exported)


def show_export(out: Output, exported: "Exported") -> None:
    """Print the command that starts the engine, with notes on what the export left out."""
    from rotationzoo.engines.export import as_json, launch_line

    for words in exported.reduced:
        out.note(f"Lost: {words}")
    out.notes(exported.launch.notes)

    def human() -> None:
        if exported.files:
            out.note(f"Files: {exported.path}")
        out.note("Next: start the engine with")
        show_lines(*launch_line(exported.launch).splitlines())

    out.result(as_json(exported), str(exported.path), human)
