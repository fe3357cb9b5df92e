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
    uncentered: bool = flag("Leave out the means of keys and values."),
    clip: Clip = None,
    windows: Windows = None,
    base: Path | None = option("llama.cpp: the GGUF file to copy and add to."),
) -> None:
    """Write the files that a serving engine reads, and print how to start it.

    rotationzoo export rotations/Qwen3-8B-transform --for sglang

    rotationzoo export rotations/Qwen3-8B-transform --for llama.cpp --base Qwen3-8B-Q8_0.gguf
    """
    if to is None:
        raise UsageError("export needs an engine", "name it: --for vllm, or --for sglang")
    from rotationzoo.artifact.reductions import Request
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.engines.export import export

    opened = Artifact.open(artifact)
    request = Request(to, follow_link(output), pooled, uncentered, clip, windows, base)
    if to != "llama.cpp" and base:
        raise UsageError("--base is for llama.cpp", hint="write: --for llama.cpp")
    exported = export(opened, request)
    if opened.manifest.metrics.evaluation is None:
        out.note("Note: these rotations have not been evaluated; rotationzoo evaluate does that")
    show_export(out, exported)


def show_export(out: Output, exported: "Exported") -> None:
    """Print the command that starts the engine, with notes on what the export leaves out."""
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
