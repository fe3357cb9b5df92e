"""The record of a calibration in a manifest: the job's identity, its text and its run."""

from typing import Any

import torch
import transformers

from rotationzoo.calibration.checkpoint import Identity
from rotationzoo.calibration.memory import device_name, peak_memory
from rotationzoo.calibration.model_run import CalibrationResult
from rotationzoo.calibration.plan import Job, Plan
from rotationzoo.model import loading
from rotationzoo.model.geometry import geometry_json
from rotationzoo.model.source import Source, config_hash, weights_fingerprint
from rotationzoo.text.rows import Corpus

_DATA_KEYS = ("source", "subset", "split", "column", "packing", "length", "seed")


def identify_job(job: Job, source: Source, text: Corpus | None) -> dict[str, str]:
    """The job's identity: everything that decides the bytes of the result.

    A checkpoint or a finished artifact belongs to the job only if all of it agrees. `text` is
    the calibration text. It is None if the recipe needs no statistics; then only the recipe and the
    config matter.
    """
    identity = {"recipe": job.recipe.hash, "config": config_hash(source), "weights": "", "text": ""}
    if text is None:
        return identity
    identity |= {
        "weights": weights_fingerprint(source),
        "text": text.fingerprint,
        "batch": str(job.batch),
        "device": device_name(job.torch_device),
        "dtype": str(job.torch_dtype),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    # On a CPU, floating-point sums depend on how many threads share them.
    threads = torch.get_num_threads() if job.torch_device == "cpu" else None
    optional = {"threads": threads, "device_map": job.device_map, "max_memory": job.max_memory}
    return identity | {key: str(value) for key, value in optional.items() if value is not None}


def manifest_content(
    planned: Plan,
    result: CalibrationResult,
    identity: Identity,
    versions: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    """The content of the manifest, without the keys that are added when it is written.

    - `planned`: the job, its model and the notes so far.
    - `result`: what the run produced.
    - `identity`: as `identify_job` returns it.
    - `versions`: library versions as they were when the job started.
    - `seconds`: how long the job took.
    """
    assert planned.config is not None
    job = planned.job
    return {
        "model": loading.describe(planned.source, planned.config, identity["weights"] or None),
        "geometry": geometry_json(result.geometry),
        "recipe": result.recipe.published(),
        "recipe_sha256": result.recipe.hash,
        "notes": [*planned.notes, *result.notes],
        "calibration": None if result.text is None else _describe_text(job, result.text),
        "identity": dict(identity),
        "versions": versions,
        "run": {
            "device": device_name(job.torch_device),
            "threads": torch.get_num_threads(),
            "dtype": result.dtype,
            "batch": job.batch,
            "seconds": round(seconds, 3),
            "peak_memory_bytes": peak_memory(),
        },
        "metrics": {"orthogonality_error": result.rotations.orthogonality_error},
    }


def _describe_text(job: Job, text: Corpus) -> dict[str, Any]:
    """The source of the calibration text, and the fingerprint that identifies it."""
    data = job.recipe.published()["data"]
    description = {key: data[key] for key in _DATA_KEYS}
    if text.media:
        media_tokens = sum(int(row.is_media.sum()) for row in text.media)
        description |= {"media_tokens": media_tokens, "text_tokens": text.tokens - media_tokens}
    return description | {
        "tokens": text.tokens,
        "rows": len(text.rows),
        "fingerprint": text.fingerprint,
        "note": text.note,
    }
