"""The bundled texts, as documents."""

import json

from rotationzoo.model.source import DEMO


def bundled_texts(name: str) -> list[str]:
    """The documents of the bundled `calibration` or `evaluation` text."""
    lines = (DEMO.parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]
