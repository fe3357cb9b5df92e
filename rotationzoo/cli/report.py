"""`rotationzoo report`: add pictures to an artifact and its card."""

from rotationzoo.cli.options import ArtifactFolder, Json, Quiet
from rotationzoo.cli.output import Output, say


def report_command(artifact: ArtifactFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Add pictures of the spectra and of the error by layer to an artifact and its card."""
    from rotationzoo.artifact.plots import add_pictures
    from rotationzoo.artifact.store import Artifact

    files = add_pictures(Artifact.open(artifact)).manifest.files
    pictures = [str(artifact / name) for name in files if name.endswith(".png")]
    out = Output(json, quiet)
    out.result({"pictures": pictures}, "\n".join(pictures), lambda: say(*pictures))
    out.suggest("push", str(artifact), "OWNER/REPO")
