"""`rotationzoo verify`: check that an artifact is whole, orthogonal and made for its model."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rotationzoo.cli.next_steps import named, shell_line, suggest_text
from rotationzoo.cli.output import Output, say
from rotationzoo.errors import RotationZooError, Undecided
from rotationzoo.settings import ArtifactFolder, Revision, Signatures
from rotationzoo.settings_base import option
from rotationzoo.words import counted

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.calibration.soundness import Verification
    from rotationzoo.checks.server import ServerCheck
    from rotationzoo.zoo.signing import Finding


def verify_command(
    artifact: ArtifactFolder,
    signatures: Signatures,
    out: Output,
    model: str | None = option("Also check that it was made for this model."),
    server: str | None = option(
        "Also check that this vLLM server reads them; exit 4 if undecided.", metavar="URL"
    ),
    revision: Revision = None,
) -> None:
    """Check that an artifact is whole, orthogonal and made for its model."""
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.checks.server import Server, recorded_probes
    from rotationzoo.checks.verify import verify
    from rotationzoo.model.source import model_words
    from rotationzoo.zoo.signing import check_artifact, make_demand

    demand = make_demand(signatures)
    opened = Artifact.open(artifact)
    running = None if server is None else Server(server, opened, recorded_probes(opened))
    verification = verify(opened, model, revision)
    finding, refusal = None, None
    if verification.ok or verification.only_misfits:  # damage is enough to report
        try:
            finding = check_artifact(opened, demand)
        except RotationZooError as error:
            refusal = error
            verification = replace(verification, problems=[str(error), *verification.problems])
    reading = running.read() if running and verification.ok else None
    refused = running and reading and (refusal := running.refusal(reading))
    if refused and not isinstance(refused, Undecided):
        verification = replace(verification, problems=[str(refused)])
    _show_verification(out, opened, verification, finding, reading)
    if out.quiet and finding is not None:
        out.notes([finding.note])
    if refusal is not None:
        raise refusal
    if not verification.ok:
        raise _error_of(opened, verification)
    if model is None:
        out.suggest("verify", str(artifact), "--model", *model_words(opened))
    else:
        suggest_text(out, opened.folder, named(model, revision))


def _error_of(artifact: "Artifact", verification: "Verification") -> RotationZooError:
    """The error for damage, or for a model that the artifact was not made for."""
    from rotationzoo.model.source import model_words

    folder = str(artifact.folder)
    if verification.only_misfits:
        right = shell_line("verify", folder, "--model", *model_words(artifact))
        misfits, hint = "; ".join(verification.misfits), f"check it with its own model: {right}"
        return RotationZooError(f"{folder} is sound, but for another model: {misfits}", hint)
    hint = "fetch it again, or make it again with the command on its card"
    if artifact.manifest.imported is not None:
        hint = "import its files again"
    count = counted(len(verification.problems), "problem")
    return RotationZooError(f"{folder} must not be used: {count} found", hint)


def _show_verification(
    out: Output,
    artifact: "Artifact",
    verification: "Verification",
    finding: "Finding | None",
    reading: "ServerCheck | None",
) -> None:
    ok = verification.ok and (reading is None or reading.verdict == "in use")
    data: dict[str, Any] = {
        "ok": ok,
        "problems": verification.problems,
        "orthogonality_error": verification.orthogonality_error,
        "checked": verification.checked,
        "signature": finding and finding.summary(),
    }
    if reading:
        data["server"] = {"verdict": reading.verdict, **asdict(reading)}
    lines = [f"Problem: {problem}" for problem in verification.problems]
    if verification.ok:
        error = f"largest |R R^T - I| {verification.orthogonality_error:.1e}"
        lines.append(f"{artifact.folder} is sound ({error})")
    if reading and reading.verdict == "in use":
        lines.append(f"The server reads these rotations: {reading.words}")
    if finding:
        lines.append(f"Signature: {finding.note}")
    if verification.checked:
        lines.append(f"Checked: {', '.join(verification.checked)}")
    out.result(data, artifact.identity if ok else "", lambda: say(*lines))
