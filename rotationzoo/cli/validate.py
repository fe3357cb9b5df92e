"""`rotationzoo validate`: check the CUDA reference against the codec and measure its speed."""

from typing import TYPE_CHECKING, Annotated, Any

from rotationzoo.cli.next_steps import suggest_step
from rotationzoo.cli.options import ArtifactFolder, Device, option
from rotationzoo.cli.output import Output, say
from rotationzoo.cli.progress_bar import show_progress
from rotationzoo.words import counted

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact


def validate_command(
    artifact: ArtifactFolder,
    out: Output,
    rows: Annotated[int, option("Rows for each layer, KV head and side.", min=64)] = 1024,
    device: Device = "auto",
) -> None:
    """Check the CUDA reference on a GPU, bit by bit, against the codec, and measure its speed.

    rotationzoo validate rotations/demo-oscar
    """
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.checks.kernel import check_device, validate_kernel

    opened = Artifact.open(artifact)
    check_device(artifact, device)
    with show_progress(out) as progress:
        report = validate_kernel(opened, rows, device, progress)
    show_validation(out, opened, report)
    suggest_step(out, opened)


def show_validation(out: Output, artifact: "Artifact", report: dict[str, Any]) -> None:
    """Print what was compared, and the throughput as a share of the device's copy bandwidth."""

    def human() -> None:
        checked = f"{counted(report['rows'], 'row')}, {counted(report['elements'], 'element')}"
        say(f"{artifact.folder}: {checked}, on {report['device']}")
        if not report["on_gpu"]:
            say(
                "Not validated on a GPU: only the codec's definition was checked, and its "
                "rotations;"
            )
            say("nothing was added to the artifact")
            return
        say("Codes and dequantized values are equal bit by bit to the definition in int2.py")
        say(f"Rotation: error {report['rotation_error']:.2f} of the bound of a float32 product")
        copy = report["copy_bytes_per_second"]
        quantize = report["quantize_bytes_per_second"] / copy
        dequantize = report["dequantize_bytes_per_second"] / copy
        shares = f"clipping and quantizing {quantize:.1%}, dequantizing {dequantize:.1%}"
        say(f"Device copy {copy / 1e12:.2f} TB/s; of that: {shares}")
        if rows := report["feedback_rows"]:
            say(f"Codes chosen by error feedback: equal to feedback.py's for {rows:,} rows")

    out.result(report, artifact.identity, human)
