"""What each command prints: tables for people, one object for machines."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rotationzoo.artifact.spectra import LayerSummary, Side, summarize
from rotationzoo.artifact.store import Artifact
from rotationzoo.calibration.plan import Job
from rotationzoo.calibration.soundness import Verification
from rotationzoo.checks.membership import Agreement
from rotationzoo.cli.output import Output, fold_command, say, show_lines, table
from rotationzoo.engines.export import Exported, as_json, launch_line
from rotationzoo.zoo.download import Pulled
from rotationzoo.zoo.due import DueModel
from rotationzoo.zoo.hubs.protocol import Published
from rotationzoo.zoo.hubs.registry import HUBS
from rotationzoo.zoo.index import Entry


def show_artifact(
    out: Output, artifact: Artifact, next_for: str | None = None, with_time: bool = True
) -> None:
    """What was made, in short; `inspect` has the table. `next_for`: the model as the user named it,
    for the command that comes next. `with_time`: it was made just now."""
    manifest = artifact.manifest
    layers = summarize(artifact)
    calibration, run = manifest.calibration, manifest.run
    tokens = calibration.tokens if calibration else 0
    data = {
        "artifact": str(artifact.folder),
        "identity": artifact.identity,
        "model": manifest.model.id,
        "revision": manifest.model.revision,
        "recipe": artifact.recipe.name,
        "layers": len(layers),
        "tokens": tokens,
        "seconds": run.seconds,
        "peak_memory_bytes": run.peak_memory_bytes,
        "orthogonality_error": manifest.metrics.orthogonality_error,
    }
    if calibration and calibration.note:
        out.note(calibration.note)
    out.notes(manifest.notes)

    def human() -> None:
        say(f"{data['model']}, recipe {data['recipe']}: {len(layers)} layers, {_ranks(layers)}")
        if manifest.search is not None:
            say(*_search_result(artifact.content["search"]["model"]))
        if with_time and manifest.imported is None:
            say(f"{tokens:,} tokens in {run.seconds:.1f} s")
        say(f"Artifact: {artifact.folder}")
        if next_for:
            command = shlex.join(["rotationzoo", "evaluate", next_for, str(artifact.folder)])
            out.note(f"Next, what it costs the model: {command}")

    out.result(data, str(artifact.folder), human)


def show_export(out: Output, done: Exported) -> None:
    for words in done.reduced:
        out.note(f"Reduced: {words}")
    out.notes(done.launch.notes)

    def human() -> None:
        for line in launch_line(done.launch).splitlines():
            show_lines(*fold_command(line))
        out.note(f"Files: {done.path}")

    out.result(as_json(done), str(done.path), human)


def show_absorbed(out: Output, model: Path, artifact: Path) -> None:
    def human() -> None:
        say(str(model))
        out.note(
            f"Now export the keys: rotationzoo export {artifact} --to ENGINE --values-absorbed {model}"
        )

    out.result({"model": str(model)}, str(model), human)


def layer_table(artifact: Artifact, layers: list[LayerSummary]) -> None:
    """Keys and values side by side, no wider than a terminal."""
    columns = [
        "layer",
        "heads",
        *(word for side in "KV" for word in (f"{side} dim", "rank", "top1", "top8")),
        "error",
    ]
    rows = []
    for layer in layers:
        row = [str(layer.layer), str(layer.kv_heads)]
        for side in (layer.key, layer.value):
            numbers = (
                (side.effective_rank, ".1f"),
                (side.top_1_share, ".1%"),
                (side.top_8_share, ".1%"),
            )
            row += [
                str(side.dim),
                *("-" if number is None else f"{number:{form}}" for number, form in numbers),
            ]
        rows.append(
            [*row, f"{max(layer.key.orthogonality_error, layer.value.orthogonality_error):.0e}"]
        )
    table(f"{artifact.manifest.model.id}, recipe {artifact.recipe.name}", columns, rows)
    say(
        "rank: effective rank of the statistic; top1, top8: share of its strongest directions; error: largest |R R^T - I|"
    )
    if artifact.manifest.search is not None:
        _search_table(artifact.content["search"])


def _ranks(layers: list[LayerSummary]) -> str:
    """Between which numbers the effective ranks of the layers are, side by side."""
    words = []
    for side in ("key", "value"):
        sides: list[Side] = [getattr(layer, side) for layer in layers]
        ranks = [one.effective_rank for one in sides if one.effective_rank is not None]
        if ranks:
            words.append(
                f"{side}s {min(ranks):.0f} to {max(ranks):.0f} of {max(one.dim for one in sides)}"
            )
    return f"effective rank of {', '.join(words)}" if words else "nothing known of their statistics"


_SERVED = {"own": (), "keys": ("key",), "values": ("value",), "both": ("key", "value")}
"""What a search kept -> the sides that its choices are served for; the others are the recipe's
own."""


def _search_table(search: dict[str, Any]) -> None:
    """What is served for each head and what it scores on held-out text, without what was chosen and
    then not kept."""
    rows = []
    for layer, sides in search["layers"].items():
        for side in _SERVED[search["model"]["kept"]]:
            for head, candidate in enumerate(sides[side]["candidate"]):
                rows.append(
                    [f"{layer} {side}s", str(head), candidate, f"{sides[side]['chosen'][head]:.2f}"]
                )
    if rows:
        table(
            "chosen on text that nothing was fitted to", ["layer", "head", "basis", "score"], rows
        )
        say(
            "score: error of the block, and attention KL of keys, of what the recipe makes without a search"
        )
    if missing := _missing_projections(search["layers"]):
        say(f"Scored without the output projection, which was not readable: {missing}")
    say(*_search_result(search["model"]))


def _search_result(model: dict[str, Any]) -> list[str]:
    """What the whole model makes of the choices, and so which of them are served."""
    kept = {
        "own": "nothing: the rotations are those that the recipe makes without a search",
        "keys": "what was chosen for keys; values as without a search",
        "values": "what was chosen for values; keys as without a search",
        "both": "what was chosen for keys and values",
    }[model["kept"]]
    words = {
        "own": "without a search",
        "keys": "keys chosen",
        "values": "values chosen",
        "both": "both chosen",
    }
    sides = ", ".join(f"{nats:.4f} {words[name]}" for name, nats in model["by_side"].items())
    clips = f"{model['key']['clip']:g} for keys and {model['value']['clip']:g} for values"
    return [
        f"Divergence of the model's predictions in nats: {sides}",
        f"Kept of the search: {kept}; clip ratios {clips} ({model['trimmed']:.4f} nats)",
    ]


def _missing_projections(layers: dict[str, Any]) -> str:
    """The layers whose heads were scored apart from the residual stream, and why."""
    by_reason: dict[str, list[str]] = {}
    for sides in layers.values():
        for layer, kept in sides.get(
            "projection", {}
        ).items():  # which searches of earlier versions do not say
            if kept.startswith("identity: "):
                by_reason.setdefault(kept.removeprefix("identity: "), []).append(layer)
    return "; ".join(
        f"layers {', '.join(numbers)} ({reason})" for reason, numbers in by_reason.items()
    )


def show_validation(out: Output, artifact: Artifact, found: dict[str, Any]) -> None:
    def human() -> None:
        say(
            f"{artifact.folder}: {found['rows']:,} rows, {found['elements']:,} elements, on {found['device']}"
        )
        if not found["on_gpu"]:
            say(
                "Not validated on a GPU: only the codec's definition was checked, and its rotations;"
            )
            say("nothing was added to the artifact")
            return
        say("Codes and dequantized values are equal bit by bit to the definition in int2.py")
        say(f"Rotation: error {found['rotation_error']:.2f} of the bound of a float32 product")
        copy = found["copy_bytes_per_second"]
        say(f"Device copy {copy / 1e12:.2f} TB/s; of that:")
        for name, rate in found["throughput"].items():
            say(f"  {name:24s} {rate / copy:.1%}")

    out.result(found, artifact.identity, human)


def show_verification(
    out: Output, artifact: Artifact, found: Verification, agreement: Agreement | None
) -> None:
    data = {
        "ok": found.ok,
        "problems": found.problems,
        "orthogonality_error": found.orthogonality_error,
    }
    data |= {"agreement": asdict(agreement)} if agreement else {}

    def human() -> None:
        for problem in found.problems:
            say(f"Problem: {problem}")
        if found.ok:
            say(f"{artifact.folder} is sound (largest |R R^T - I| {found.orthogonality_error:.1e})")
        if agreement:
            shares = f"keys {agreement.key:.2f}, values {agreement.value:.2f} of 1"
            say(f"Agreement with what the model computes: {shares} ({agreement.verdict})")
        say(f"Checked: {', '.join(found.checked)}")

    out.result(data, artifact.identity if found.ok else "", human)


def show_push_plan(out: Output, repo: str, files: list[dict[str, Any]]) -> None:
    def human() -> None:
        table(
            f"would go to {repo}",
            ["file", "bytes"],
            [[file["path"], f"{file['size']:,}"] for file in files],
        )

    out.result({"repo": repo, "files": files}, "\n".join(file["path"] for file in files), human)


def show_push(out: Output, repo: str, path: str, done: dict[str, Published]) -> None:
    data = {
        "repo": repo,
        "path": path,
        "hubs": {name: asdict(place) for name, place in done.items()},
    }

    def human() -> None:
        for name, place in done.items():
            say(
                f"{name}: {'published' if place.changed else 'nothing new'}, revision {place.revision}, {place.url}"
            )

    out.result(data, "\n".join(place.revision for place in done.values()), human)


def show_pull(out: Output, pulled: Pulled) -> None:
    out.notes(pulled.notes)
    data = {
        "path": str(pulled.path), "repo": pulled.copy.repo, "hub": pulled.copy.hub, "revision": pulled.revision,
        "model": pulled.entry.model, "recipe": pulled.entry.recipe, "format": pulled.entry.format, "files": pulled.files,
        "notes": pulled.notes,
    }  # fmt: skip
    out.result(data, str(pulled.path), lambda: say(str(pulled.path)))
    if pulled.entry.format == "oscar":
        out.note(
            f"Note: make an artifact of them with: rotationzoo import {pulled.path} --model {pulled.entry.model}"
        )


_THERE = {True: "yes", False: "no", None: "not known"}
_KINDS = {"rotationzoo": "artifact", "oscar": "pair", "latent": "latent", "gguf": "GGUF"}


def show_list(out: Output, entries: list[Entry], artifact: list[bool | None] | None) -> None:
    data = {"entries": [entry.model_dump() for entry in entries]}
    if artifact is not None:
        for content, found in zip(data["entries"], artifact, strict=True):
            content["there"] = found

    def human() -> None:
        columns = [
            "model",
            "recipe",
            "files",
            "revision",
            "hubs",
            "cost",
            *(["there"] if artifact is not None else []),
        ]
        rows = []
        for number, entry in enumerate(entries):
            arms = (entry.evaluation or {}).get("arms", {})
            cost = f"{next(iter(arms.values()))['perplexity_increase']:+.2%}" if arms else "-"
            hubs = "+".join(sorted({HUBS[copy.hub].abbreviation for copy in entry.copies}))
            row = [
                entry.model,
                entry.recipe,
                _KINDS[entry.format],
                (entry.model_revision or "-")[:8],
                hubs,
                cost,
            ]
            rows.append([*row, *([_THERE[artifact[number]]] if artifact is not None else [])])
        equal = [number for number, row in enumerate(rows) if rows.count(row) > 1]
        for footnote, number in enumerate(equal, 1):
            rows[number][1] += f" ({footnote})"
        table(f"{len(entries)} published rotations", *_without_empty(columns, rows))
        for footnote, number in enumerate(equal, 1):
            say(f"({footnote}) from the folder {entries[number].copies[0].path}")

    out.result(data, "\n".join(dict.fromkeys(entry.model for entry in entries)), human)


def _without_empty(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Without columns that say nothing in any row, but for the first."""
    kept = [
        number
        for number in range(len(columns))
        if not number or any(row[number] != "-" for row in rows)
    ]
    return [columns[number] for number in kept], [[row[number] for number in kept] for row in rows]


def show_due(out: Output, due: list[DueModel], unknown: Mapping[str, Exception]) -> None:
    def human() -> None:
        table(
            f"{len(due)} due",
            ["model", "revision", "was", "reason"],
            [[d.model, d.revision[:12], (d.was or "-")[:12], d.reason] for d in due],
        )

    data = {
        "models": [asdict(d) for d in due],
        "unknown": {name: str(error) for name, error in unknown.items()},
    }
    out.result(data, "\n".join(d.model for d in due), human)


def show_regenerated(
    out: Output, job: Job, verdict: dict[str, Any], done: dict[str, Published]
) -> None:
    data = {
        **{key: value for key, value in verdict.items() if key != "report"},
        "hubs": {n: asdict(p) for n, p in done.items()},
    }

    def human() -> None:
        where = verdict["validated_on"]
        say(
            f"{job.output}, {f'validated on {where}' if where else 'not validated: there is no GPU here'}"
        )
        if verdict["compared_with"]:
            error = verdict["standard_error"]
            say(
                f"log perplexity {verdict['log_perplexity_difference']:+.4f} ±{error or 0:.4f} beside the published rotations"
            )
        for name, place in done.items():
            say(f"{name}: {place.url}")

    out.result(data, str(job.output), human)
