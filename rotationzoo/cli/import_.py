"""`rotationzoo import`: make an artifact from rotations that others published."""

from pathlib import Path

from rotationzoo.cli import options
from rotationzoo.cli.next_steps import named, show_artifact, suggest_step
from rotationzoo.cli.output import Output
from rotationzoo.options import argument, option
from rotationzoo.settings import Revision


def import_command(
    out: Output,
    files: list[Path] = argument(
        "The two rotation files, their folder, or a GGUF file.", metavar="FILES"
    ),
    model: str = option("The model that they are for: a hub id or a folder.", default=...),
    output: Path | None = option("Artifact folder (rotations/NAME-imported).", "--output", "-o"),
    revision: Revision = None,
    clip: options.Clip = None,
    windows: options.Windows = None,
    group_size: int | None = option("Channels that share a scale (the whole head).", min=1),
    restart: options.Restart = False,
) -> None:
    """Make an artifact of files that others published: OSCAR's .pt files, GGUF.

    rotationzoo import k_rotation_qqt_r_h_pbr.pt v_rotation_sst_r_h_pbr.pt --model
    Qwen/Qwen3-4B-Thinking-2507
    """
    from rotationzoo.engines.import_ import Import, import_
    from rotationzoo.storage.folders import default_output

    job = Import(
        files=files,
        output=options.follow_link(output) or default_output(model, "imported"),
        model=model,
        revision=revision,
        clip=clip,
        windows=windows,
        group_size=group_size,
        restart=restart,
    )
    artifact = import_(job)
    assert artifact.manifest.imported is not None
    out.notes(artifact.manifest.imported.notes)
    show_artifact(out, artifact)
    suggest_step(out, artifact, named(model, revision))
