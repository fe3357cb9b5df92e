"""The sections of a page on what an artifact is, and how it was made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rotationzoo.artifact.manifest import ValidationSummary
from rotationzoo.artifact.store import ANSWERS, REPORT, Artifact
from rotationzoo.geometry import cached_layers
from rotationzoo.report.card import describe_serving
from rotationzoo.report.commands import RECIPE_FILE, reproduce_command
from rotationzoo.report.figures import Section
from rotationzoo.report.tables import Table
from rotationzoo.words import counted


@dataclass(frozen=True)
class Badge:
    """A finding in words, and what it is about. It is good, or wrong, or plainly not known."""

    about: str
    kind: Literal["good", "warning", "plain"]
    words: str

    @property
    def sign(self) -> str:
        """A sign before the words, which says the same as their colour."""
        return "\u2713" if self.kind == "good" else "!"


def describe_identity(artifact: Artifact, badges: Sequence[Badge]) -> Section:
    """What the artifact is, with what is known of it."""
    manifest, cached = artifact.manifest, cached_layers(artifact.geometry)
    model, recipe = manifest.model, artifact.recipe
    heads = sorted({layer.kv_heads for layer in cached})
    dims = sorted({layer.key_dim for layer in cached})
    rows = f"KV heads {_listed(heads)}, head dimension {_listed(dims)}"
    if manifest.has_latents:
        rows = f"latents of {_listed(dims)} elements"
    shape = f"{counted(len(cached), 'layer')} with a cache, {rows}"
    facts = [
        ("Model", model.id if artifact.bound else "not named yet"),
        ("Revision", model.revision or "a local folder"),
        ("Shape", f"{model.architecture}, {shape}"),
        ("Recipe", recipe.name),
        ("Calibration text", _describe_text(artifact)),
        ("To serve with", describe_serving(manifest, recipe)),
    ]
    facts += [(badge.about, badge.words) for badge in badges]
    return Section(anchor="identity", title="What it is", facts=facts)


def validation_badge(summary: ValidationSummary | None) -> Badge:
    """The validation of the CUDA codec, in words."""
    kind: Literal["good", "warning", "plain"] = "plain"
    if summary is None:
        words = "The CUDA codec has not been run on these matrices"
    elif not summary.on_gpu:
        words = f"Validated without a GPU, on {summary.device}"
    elif summary.codes_equal and summary.dequantized_equal:
        kind = "good"
        words = f"The CUDA codec agrees bit by bit with its definition, on {summary.device}"
    else:
        kind, words = "warning", f"The CUDA codec differs from its definition on {summary.device}"
    return Badge("Validation", kind, words)


def describe_making(artifact: Artifact) -> Section:
    """The command that makes it again, and the hashes of its files."""
    manifest = artifact.manifest
    rows = []
    for name, file in sorted(manifest.files.items()):
        if name not in (ANSWERS, REPORT):  # which are made from the others
            rows.append([name, f"{file.size:,}", file.sha256])
    command, commands = reproduce_command(manifest), []
    words = [f"Imported by rotationzoo {manifest.versions.rotationzoo}, matrices unchanged."]
    if command is not None:
        commands.append(command)
        words = [
            f"By rotationzoo {manifest.versions.rotationzoo} on "
            f"{manifest.run.device or 'an unrecorded device'} in {manifest.run.seconds:.0f} s. The "
            "same command on a machine of the same kind, with as many threads, writes these bytes. "
            f"Largest |R R^T - I|: {manifest.metrics.orthogonality_error:.1e}."
        ]
        if RECIPE_FILE in command:
            words.append(f"{RECIPE_FILE} holds the recipe that stands below.")
            commands.append(artifact.recipe.yaml().strip())
    tables = [Table("Files", ["file", "bytes", "sha256"], rows)]
    title = "How it was made"
    return Section(anchor="made", title=title, words=words, commands=commands, tables=tables)


def _describe_text(artifact: Artifact) -> str:
    manifest = artifact.manifest
    if manifest.imported is not None:
        return "not known to rotationzoo: the files were imported"
    text = manifest.calibration
    if text is None:
        return "none: the rotation does not depend on data"
    media = f", {text.media_tokens:,} of them of images or audio" if text.media_tokens else ""
    return f"{counted(text.tokens, 'token')} of {text.source} in {counted(text.rows, 'row')}{media}"


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
