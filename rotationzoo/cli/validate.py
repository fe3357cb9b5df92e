"""`rotationzoo validate`: check the CUDA reference against the codec."""

from rotationzoo.cli.next_steps import suggest_step
from rotationzoo.cli.output import Output, say
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.settings import ArtifactFolder
from rotationzoo.settings_base import option
from rotationzoo.words import counted


def validate_command(
    artifact: ArtifactFolder,
    out: Output,
    rows: int = option("Rows of each layer, KV head and side.", min=64, default=1024),
) -> None:
    """Check the CUDA reference on a GPU, bit by bit, against the codec.

    rotationzoo validate rotations/demo-transform
    """
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.checks.kernel import validate_kernel

    opened = Artifact.open(artifact)
    with show_progress(out) as progress:
        report = validate_kernel(opened, rows, progress)

    def human() -> None:
        checked = f"{counted(report['rows'], 'row')}, {counted(report['elements'], 'element')}"
        say(f"{opened.folder}: {checked}, on {report['device']}")
        say("Codes and dequantized values are equal bit by bit to the definition in int2.py")
        say(f"Rotation: error {report['rotation_error']:.2f} of the bound of a float32 product")

    out.result(report, opened.identity, human)
    suggest_step(out, opened)
