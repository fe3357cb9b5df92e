"""`rotationzoo import`: make an artifact from rotations that others published."""

from dataclasses import replace

from rotationzoo.cli.next_steps import named, show_artifact, suggest_step
from rotationzoo.cli.output import Output
from rotationzoo.settings import Import
from rotationzoo.storage.folders import follow_link


def import_command(job: Import, out: Output) -> None:
    """Make an artifact from OSCAR's published .pt files.

    rotationzoo import k_rotation_qqt_r_h_pbr.pt v_rotation_sst_r_h_pbr.pt --model
    Qwen/Qwen3-4B-Thinking-2507
    """
    from rotationzoo.engines.import_ import import_
    from rotationzoo.storage.folders import default_output

    output = follow_link(job.output) or default_output(job.model, "imported")
    artifact = import_(replace(job, output=output))
    assert artifact.manifest.imported is not None
    out.notes(artifact.manifest.imported.notes)
    show_artifact(out, artifact)
    suggest_step(out, artifact, named(job.model, job.revision))
