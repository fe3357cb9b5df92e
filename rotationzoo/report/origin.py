"""The sections of a page on what an artifact is, how small its cache is, how to use it, and how it
was made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rotationzoo.artifact.manifest import ValidationSummary
from rotationzoo.artifact.store import ANSWERS, REPORT, Artifact
from rotationzoo.codec import int2
from rotationzoo.model.geometry import Geometry, cached_layers
from rotationzoo.report.card import UNRECORDED
from rotationzoo.report.charts import Bar, draw_bars
from rotationzoo.report.commands import (
    RECIPE_FILE,
    name_in_commands,
    reproduce_command,
)
from rotationzoo.report.figures import Figure, Section
from rotationzoo.report.tables import Table
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.size import EXACT_BITS, bits_per_element
from rotationzoo.words import byte_count, counted

_CONTEXTS = {8192: "8K", 32768: "32K", 131072: "128K"}
_DEFAULT = "sglang"  # where nothing was evaluated


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
    """The artifact in short: names and values."""
    manifest, cached = artifact.manifest, cached_layers(artifact.geometry)
    model = manifest.model
    heads = sorted({layer.kv_heads for layer in cached})
    dims = sorted({layer.key_dim for layer in cached})
    shape = (
        f"{counted(len(cached), 'layer')} with a cache, KV heads {_listed(heads)}, head dimension "
        f"{_listed(dims)}"
    )
    return [
        ("Model", model.id if artifact.bound else "not named yet"),
        ("Revision", model.revision or "a local folder"),
        ("Shape", f"{model.architecture}, {shape}"),
        ("Recipe", artifact.recipe.name),
        ("Calibration text", _describe_text(artifact)),
    ]


def validation_badge(summary: ValidationSummary | None) -> Badge:
    """The validation of the CUDA codec, in words."""
    if summary is None:
        return Badge("plain", "The CUDA codec has not been run on these matrices")
    if not summary.on_gpu:
        return Badge("plain", f"Validated without a GPU, on {summary.device}")
    if summary.codes_equal and summary.dequantized_equal:
        return Badge(
            "good", f"The CUDA codec agrees bit by bit with its definition, on {summary.device}"
        )
    return Badge("warning", f"The CUDA codec differs from its definition on {summary.device}")


def describe_memory(artifact: Artifact, format: str | None) -> Section:
    """The size of a cache of some lengths in the `format` that was evaluated, if any: figures that
    follow from shapes alone."""
    recipe = artifact.recipe
    name = format if format in int2.FORMATS else _DEFAULT
    elements = _count_elements(artifact.geometry)
    exact = elements * EXACT_BITS / 8
    bars, rows = [], []
    for context, label in _CONTEXTS.items():
        bits = bits_per_element(
            artifact.geometry, CacheLayout.of_recipe(recipe, int2.FORMATS[name]), context
        )
        here = elements * bits / 8
        for what, bytes_per_token in (("bf16", exact), ("2 bits", here)):
            total = bytes_per_token * context
            bars.append(Bar(f"{label} {what}", total / 2**20, byte_count(total), what != "bf16"))
        rows.append(
            [
                f"{context:,}",
                f"{exact:,.0f}",
                f"{here:,.0f}",
                byte_count(exact * context),
                byte_count(here * context),
                f"{exact / here:.1f} times",
            ]
        )
    about = (
        f"Of one request in the format {name}, with the first {recipe.sink} and the last "
        f"{recipe.recent} tokens in bfloat16, from the shapes of the model's keys and values. "
        "Layers with a sliding window keep fewer tokens than this: rotationzoo plan counts them."
    )
    columns = [
        "tokens",
        "bf16, bytes a token",
        "2 bits, bytes a token",
        "bf16",
        "2 bits",
        "smaller",
    ]
    chart = draw_bars(bars, "MiB")
    figure = Figure("memory", chart, Table("Memory of the cache", columns, rows))
    return Section("memory", "Memory saved", [about], [figure])


def _count_elements(geometry: Geometry) -> int:
    """The elements that all layers cache of one token."""
    sizes = [
        layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in cached_layers(geometry)
    ]
    return sum(sizes)


def describe_use(artifact: Artifact) -> Section:
    """The commands that fetch, check, export and run the artifact."""
    name, recipe = name_in_commands(artifact.manifest.model), artifact.recipe
    commands = [
        f"rotationzoo verify FOLDER --model {name}",
        "rotationzoo export FOLDER --to sglang",
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
        if name not in (ANSWERS, REPORT):  # which are made from the others
            rows.append([name, f"{file.size:,}", file.sha256])
    tables = [Table("Files", ["file", "bytes", "sha256"], rows)]
    command = reproduce_command(manifest)
    title = "How it was made"
    if command is None:
        words = [f"Imported by rotationzoo {manifest.versions.rotationzoo}, matrices unchanged."]
        return Section("made", title, words, tables=tables)
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
    return Section("made", title, words, tables=tables, commands=commands)


def _describe_text(artifact: Artifact) -> str:
    manifest = artifact.manifest
    if manifest.imported is not None:
        return "not known to rotationzoo: the files were imported"
    text = manifest.calibration
    if text is None:
        return "none: the rotation does not depend on data"
    return f"{counted(text.tokens, 'token')} of {text.source} in {counted(text.rows, 'row')}"


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
