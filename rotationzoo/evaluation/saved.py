"""What `evaluate --save` adds to an artifact: all that was measured of it, and in its manifest a
summary."""

import json
from collections.abc import Sequence
from typing import Any

from rotationzoo.artifact.store import EVALUATION, Artifact
from rotationzoo.artifact.writer import add_files
from rotationzoo.evaluation.verdict import judge


def save(report: dict[str, Any], artifact: Artifact, own: str, baselines: Sequence[str]) -> None:
    """Add `evaluation.json` to an artifact: its own arm and the baselines."""
    shared = {
        key: value for key, value in report.items() if key not in ("arms", "verdict", "windows")
    }
    windows = []
    for window in report["windows"]:
        arms = {name: window["arms"][name] for name in (own, *baselines)}
        verdict = judge(arms, [own], report["exact"]["text_tokens"])
        windows.append({**window, "arms": arms, "verdict": verdict})
    first = windows[0]
    summary = {
        "text": report["text"]["source"], "tokens": report["tokens"], "perplexity": report["exact"]["perplexity"],
        "format": report["format"], "sink": first["sink"], "recent": first["recent"],
        "prefill_chunk": report["prefill_chunk"], "prefill_layout": report["prefill_layout"],
        "arms": {
            name: {key: arm[key] for key in ("perplexity_increase", "attention_kl", "output_error", "standard_error")}
            for name, arm in first["arms"].items()
        },
        "texts": first["verdict"]["texts"], "verdict": first["verdict"]["words"],
    }  # fmt: skip
    content = json.dumps({**shared, "own_arm": own, "windows": windows}, indent=2) + "\n"
    add_files(artifact, {EVALUATION: content.encode()}, {"evaluation": summary})
