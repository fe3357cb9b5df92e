"""What each command prints: tables for people, one object for machines."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rotationzoo.artifact import Artifact
from rotationzoo.card import CONTEXT, chunks
from rotationzoo.console import Output, table
from rotationzoo.export import Exported, as_json, launch_line
from rotationzoo.hubs import Published
from rotationzoo.index import Entry
from rotationzoo.plan import Job
from rotationzoo.pull import Pulled
from rotationzoo.release import Due
from rotationzoo.summary import LayerSummary, summarize


def show_artifact(out: Output, artifact: Artifact, model: str | None = None) -> None:
    """What was made; with the `model` as the user named it, also the command that comes next."""
    manifest = artifact.manifest
    layers = summarize(artifact)
    calibration = manifest["calibration"] or {"tokens": 0, "note": None}
    data = {
        "artifact": str(artifact.folder),
        "identity": artifact.identity,
        "model": manifest["model"]["id"],
        "revision": manifest["model"]["revision"],
        "recipe": manifest["recipe"]["name"],
        "layers": len(layers),
        "tokens": calibration["tokens"],
        "seconds": manifest["run"]["seconds"],
        "peak_memory_bytes": manifest["run"]["peak_memory_bytes"],
        "orthogonality_error": manifest["metrics"]["orthogonality_error"],
    }
    out.notes([*([calibration["note"]] if calibration["note"] else []), *manifest.get("notes", [])])

    def human() -> None:
        layer_table(artifact, layers)
        if "imported" not in manifest:
            print(f"{calibration['tokens']:,} tokens in {manifest['run']['seconds']:.1f} s")
        print(f"Artifact: {artifact.folder}")
        if model:
            print(f"Next: {shlex.join(['rotationzoo', 'evaluate', model, str(artifact.folder)])}", file=sys.stderr)

    out.result(data, str(artifact.folder), human)


def show_export(out: Output, done: Exported) -> None:
    for words in done.reduced:
        out.note(f"Reduced: {words}")
    out.notes(done.launch.notes)

    def human() -> None:
        print(launch_line(done.launch))
        print(f"Files: {done.path}", file=sys.stderr)

    out.result(as_json(done), str(done.path), human)


def show_absorbed(out: Output, model: Path, artifact: Path) -> None:
    def human() -> None:
        print(model)
        print(f"Now export the keys: rotationzoo export {artifact} --to ENGINE --values-absorbed {model}", file=sys.stderr)

    out.result({"model": str(model)}, str(model), human)


def layer_table(artifact: Artifact, layers: list[LayerSummary]) -> None:
    """Keys and values side by side, no wider than a terminal."""
    columns = ["layer", "heads", *(word for side in "KV" for word in (f"{side} dim", "rank", "top1", "top8")), "error"]
    rows = []
    for layer in layers:
        row = [str(layer.layer), str(layer.kv_heads)]
        for side in (layer.key, layer.value):
            numbers = ((side.effective_rank, ".1f"), (side.top_1_share, ".1%"), (side.top_8_share, ".1%"))
            row += [str(side.dim), *("-" if number is None else f"{number:{form}}" for number, form in numbers)]
        rows.append([*row, f"{max(layer.key.orthogonality_error, layer.value.orthogonality_error):.0e}"])
    table(f"{artifact.manifest['model']['id']}, recipe {artifact.manifest['recipe']['name']}", columns, rows)
    print("rank: effective rank of the statistic; top1, top8: share of its strongest")
    print("directions; error: largest |R R^T - I|")
    if "search" in artifact.manifest:
        _search_table(artifact.manifest["search"])


def _search_table(found: dict[str, Any]) -> None:
    """What was chosen for each head, what it scores on held-out text, and what the model makes of all of it."""
    rows = []
    for layer, sides in found["layers"].items():
        for side in ("key", "value"):
            chosen = sides[side]
            for head, candidate in enumerate(chosen["candidate"]):
                rows.append([f"{layer} {side}s", str(head), candidate, f"{chosen['chosen'][head]:.2f}"])
    table("chosen on text that nothing was fitted to", ["layer", "head", "basis", "score"], rows)
    print("score: error of the block, and attention KL of keys, of what the recipe makes without a search")
    if missing := _missing_projections(found["layers"]):
        print(f"Scored without the output projection, which was not readable: {missing}")
    model = found["model"]
    sides = ", ".join(f"{name} {nats:.4f}" for name, nats in model["by_side"].items())
    print(f"Divergence of the model's predictions in nats, without a search and with what was chosen for: {sides}")
    clips = f"{model['key']['clip']:g} for keys and {model['value']['clip']:g} for values"
    print(f"Kept: {model['kept']}, with the clip ratios {clips} ({model['trimmed']:.4f} nats)")


def _missing_projections(layers: dict[str, Any]) -> str:
    """The layers whose heads were scored apart from the residual stream, and why."""
    by_reason: dict[str, list[str]] = {}
    for sides in layers.values():
        for layer, kept in sides.get("projection", {}).items():  # which searches of earlier versions do not say
            if kept.startswith("identity: "):
                by_reason.setdefault(kept.removeprefix("identity: "), []).append(layer)
    return "; ".join(f"layers {', '.join(numbers)} ({reason})" for reason, numbers in by_reason.items())


def show_evaluation(out: Output, report: dict[str, Any]) -> None:
    """One table of all arms for each window, and the increase by context length."""
    out.notes(report["notes"])

    def human() -> None:
        print(f"{report['model']}, {report['tokens']:,} tokens from position {report['first_position']} on in ", end="")
        print(f"{report['text']['rows']} texts, format {report['format']}{chunks(report)}; ", end="")
        print(f"exact perplexity {report['exact']['perplexity']:.4f}")
        for window in report["windows"]:
            _arm_table(window)
        print("±: standard error over texts, paired with the exact model")
        print(f"bits: of a cached element at {CONTEXT:,} tokens, windows included")

    out.result(report, "\n".join(report["arms"]), human)


def _arm_table(window: dict[str, Any]) -> None:
    arms = window["arms"]
    rows, by_length = [], []
    for name, arm in arms.items():
        error = arm["standard_error"]
        measured = [
            _with_error(arm["perplexity_increase"], error["perplexity_increase"], "+.2%", ".2%"),
            _with_error(arm["attention_kl"], error["attention_kl"], ".4f", ".4f"),
            _with_error(arm["output_error"], error["output_error"], ".4f", ".4f"),
        ]
        rows.append([name, *measured, f"{arm['bits_per_element']:.2f}"])
        by_length.append([name, *(f"{bucket['perplexity_increase']:+.1%}" for bucket in arm["by_length"])])
    title = f"sink {window['sink']}, recent {window['recent']}"
    table(title, ["arm", "perplexity", "attention KL", "block error", "bits"], rows)
    starts = [f"from {bucket['from']:,}" for bucket in next(iter(arms.values()))["by_length"]]
    table("by context length", ["arm", *starts], by_length)


def _with_error(value: float | None, error: float | None, form: str, error_form: str) -> str:
    if value is None:
        return "-"
    return f"{value:{form}}" + ("" if error is None else f" ±{error:{error_form}}")


def show_validation(out: Output, artifact: Artifact, found: dict[str, Any]) -> None:
    def human() -> None:
        print(f"{artifact.folder}: {found['rows']:,} rows, {found['elements']:,} elements, on {found['device']}")
        if not found["on_gpu"]:
            print("Not validated on a GPU: only the codec's definition was checked, and its rotations;")
            print("nothing was added to the artifact")
            return
        print("Codes and dequantized values are equal bit by bit to the definition in int2.py")
        print(f"Rotation: error {found['rotation_error']:.2f} of the bound of a float32 product")
        copy = found["copy_bytes_per_second"]
        print(f"Device copy {copy / 1e12:.2f} TB/s; of that:")
        for name, rate in found["throughput"].items():
            print(f"  {name:24s} {rate / copy:.1%}")

    out.result(found, artifact.identity, human)


def show_push_plan(out: Output, repo: str, files: list[dict[str, Any]]) -> None:
    def human() -> None:
        table(f"would go to {repo}", ["file", "bytes"], [[file["path"], f"{file['size']:,}"] for file in files])

    out.result({"repo": repo, "files": files}, "\n".join(file["path"] for file in files), human)


def show_push(out: Output, repo: str, path: str, done: dict[str, Published]) -> None:
    data = {"repo": repo, "path": path, "hubs": {name: asdict(place) for name, place in done.items()}}

    def human() -> None:
        for name, place in done.items():
            print(f"{name}: {'published' if place.changed else 'nothing new'}, revision {place.revision}, {place.url}")

    out.result(data, "\n".join(place.revision for place in done.values()), human)


def show_pull(out: Output, pulled: Pulled) -> None:
    out.notes(pulled.notes)
    data = {
        "path": str(pulled.path), "repo": pulled.copy.repo, "hub": pulled.copy.hub, "revision": pulled.revision,
        "model": pulled.entry.model, "recipe": pulled.entry.recipe, "format": pulled.entry.format, "files": pulled.files,
        "notes": pulled.notes,
    }  # fmt: skip
    out.result(data, str(pulled.path), lambda: print(pulled.path))
    if pulled.entry.format == "oscar":
        out.note(f"Note: make an artifact of them with: rotationzoo import {pulled.path} --model {pulled.entry.model}")


_THERE = {True: "yes", False: "no", None: "not known"}
_SHORT = {"huggingface": "hf", "modelscope": "ms"}


_KINDS = {"rotationzoo": "artifact", "oscar": "pair", "latent": "latent", "gguf": "GGUF"}


def show_list(out: Output, entries: list[Entry], there: list[bool | None] | None) -> None:
    data = {"entries": [entry.model_dump() for entry in entries]}
    if there is not None:
        for content, found in zip(data["entries"], there, strict=True):
            content["there"] = found

    def human() -> None:
        columns = ["model", "recipe", "files", "revision", "hubs", "cost", *(["there"] if there is not None else [])]
        rows = []
        for number, entry in enumerate(entries):
            arms = (entry.evaluation or {}).get("arms", {})
            cost = f"{next(iter(arms.values()))['perplexity_increase']:+.2%}" if arms else "-"
            hubs = "+".join(sorted({_SHORT[copy.hub] for copy in entry.copies}))
            row = [entry.model, entry.recipe, _KINDS[entry.format], (entry.model_revision or "-")[:8], hubs, cost]
            rows.append([*row, *([_THERE[there[number]]] if there is not None else [])])
        table(f"{len(entries)} published rotations", columns, rows)

    out.result(data, "\n".join(dict.fromkeys(entry.model for entry in entries)), human)


def show_due(out: Output, due: list[Due], unknown: Mapping[str, Exception]) -> None:
    def human() -> None:
        table(
            f"{len(due)} due",
            ["model", "revision", "was", "reason"],
            [[d.model, d.revision[:12], (d.was or "-")[:12], d.reason] for d in due],
        )

    data = {"models": [asdict(d) for d in due], "unknown": {name: str(error) for name, error in unknown.items()}}
    out.result(data, "\n".join(d.model for d in due), human)


def show_regenerated(out: Output, job: Job, verdict: dict[str, Any], done: dict[str, Published]) -> None:
    data = {
        **{key: value for key, value in verdict.items() if key != "report"},
        "hubs": {n: asdict(p) for n, p in done.items()},
    }

    def human() -> None:
        where = verdict["validated_on"]
        print(f"{job.output}, {f'validated on {where}' if where else 'not validated: there is no GPU here'}")
        if verdict["compared_with"]:
            error = verdict["standard_error"]
            print(
                f"log perplexity {verdict['log_perplexity_difference']:+.4f} ±{error or 0:.4f} beside the published rotations"
            )
        for name, place in done.items():
            print(f"{name}: {place.url}")

    out.result(data, str(job.output), human)
