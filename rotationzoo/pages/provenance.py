"""The sections on what an artifact is, how to use it, and how it was made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rotationzoo.artifact.card_source import UNRECORDED
from rotationzoo.artifact.reproduce import (
    RECIPE_FILE,
    export_commands,
    name_in_commands,
    reproduce_command,
)
from rotationzoo.artifact.results import ValidationSummary
from rotationzoo.artifact.store import ANSWERS, REPORT, SPECTRA, Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.model.geometry import cached_layers
from rotationzoo.pages.figures import Section, Table
from rotationzoo.recipe import SELF
from rotationzoo.words import counted
from rotationzoo.zoo.signing.check import Demand, check_artifact


@dataclass(frozen=True)
class Badge:
    """A finding in words, with a sign and a colour that say the same."""

    kind: Literal["good", "warning", "plain"]
    words: str

    @property
    def sign(self) -> str:
        """A sign before the words."""
        return {"good": "\u2713", "warning": "!", "plain": "\u2013"}[self.kind]


def describe_identity(artifact: Artifact) -> list[tuple[str, str]]:
    """What the artifact is: names and values."""
    manifest, cached = artifact.manifest, cached_layers(artifact.geometry)
    model = manifest.model
    heads = sorted({layer.kv_heads for layer in cached})
    dims = sorted({layer.key_dim for layer in cached})
    shape = (
        f"{counted(len(cached), 'layer')} with a cache, KV heads {_listed(heads)}, head dimension "
        f"{_listed(dims)}"
    )
    return [
        ("Model", model.id if artifact.bound else "nobody has said which"),
        ("Revision", model.revision or "a local folder"),
        ("Shape", f"{model.architecture}, {shape}"),
        ("Recipe", artifact.recipe.name),
        ("Calibration text", _describe_text(artifact)),
    ]


def describe_badges(artifact: Artifact) -> list[Badge]:
    """The signature and the validation, in words."""
    return [_signature(artifact), _validation(artifact.manifest.metrics.validation)]


def _signature(artifact: Artifact) -> Badge:
    # The folder's name is that of one machine, and readers of a page have another.
    name = str(artifact.folder)
    try:
        finding = check_artifact(artifact, Demand())
    except RotationZooError as error:
        return Badge("warning", f"Signature refused: {error}".replace(name, "the artifact"))
    words = finding.note.partition(";")[0].partition(": add --signer")[0]
    kind: Literal["good", "warning"] = "good" if finding.state == "signed" else "warning"
    return Badge(kind, words.replace(name, "The artifact"))


def _validation(summary: ValidationSummary | None) -> Badge:
    if summary is None:
        return Badge("plain", "The CUDA codec has not been run on these matrices")
    if not summary.on_gpu:
        return Badge("plain", f"Validated without a GPU, on {summary.device}")
    if summary.codes_equal and summary.dequantized_equal:
        return Badge(
            "good", f"The CUDA codec agrees bit by bit with its definition, on {summary.device}"
        )
    return Badge("warning", f"The CUDA codec differs from its definition on {summary.device}")


def describe_use(artifact: Artifact) -> Section:
    """The commands that fetch, check, export and run the artifact."""
    name, recipe = name_in_commands(artifact.manifest.model), artifact.recipe
    commands = [
        f"rotationzoo verify FOLDER --model {name}",
        *export_commands(artifact.manifest),
        f"rotationzoo generate {name} --rotations FOLDER --prompt 'Once upon a time'",
    ]
    clips = artifact.clip_ratios
    words = (
        f"Serve with clip ratios {clips['key']:g} for keys and {clips['value']:g} for values, and "
        f"with the first {recipe.sink} and the last {recipe.recent} tokens exact. FOLDER is the "
        "artifact's."
    )
    if name not in ("demo", "MODEL"):
        scaling = f" --rope-scaling {recipe.rope_scaling}" if recipe.rope_scaling else ""
        pull = f"rotationzoo pull {name} --recipe {recipe.name}{scaling} --local-dir FOLDER"
        commands.insert(0, pull)
        words += (
            " The first command fetches what has been published for the model by this recipe; "
            "leave it out if you have the artifact already."
        )
    return Section("use", "How to use it", [words], commands=commands)


def describe_making(artifact: Artifact) -> Section:
    """The command that makes it again, and the hashes of its files."""
    manifest = artifact.manifest
    rows = []
    for name, file in sorted(manifest.files.items()):
        if name not in (ANSWERS, SPECTRA, REPORT):  # which are made from the others
            rows.append([name, f"{file.size:,}", file.sha256])
    table = Table(["file", "bytes", "sha256"], rows)
    command = reproduce_command(manifest)
    title = "How it was made"
    if command is None:
        words = [f"Imported by rotationzoo {manifest.versions.rotationzoo}, matrices unchanged."]
        return Section("made", title, words, table=table)
    words = [
        f"By rotationzoo {manifest.versions.rotationzoo} on {manifest.run.device or UNRECORDED} in "
        f"{manifest.run.seconds:.0f} s. The same command on a machine of the same kind, with "
        "as many threads, writes the same bytes. Largest |R R^T - I|: "
        f"{manifest.metrics.orthogonality_error:.1e}."
    ]
    commands = [command]
    if RECIPE_FILE in command:
        words.append(f"{RECIPE_FILE} holds the recipe that stands below.")
        commands.append(artifact.recipe.yaml().strip())
    return Section("made", title, words, table=table, commands=commands)


def _describe_text(artifact: Artifact) -> str:
    manifest = artifact.manifest
    if manifest.imported is not None:
        return "not known to rotationzoo: the files were imported"
    text = manifest.calibration
    if text is None:
        return "none: the rotation does not depend on data"
    source = "what the model wrote itself" if text.source == SELF else text.source
    return f"{counted(text.tokens, 'token')} of {source} in {counted(text.rows, 'row')}"


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
