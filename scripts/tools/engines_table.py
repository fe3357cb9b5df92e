"""The tables of engines in docs/engines.md, made from the rows of the registry and what is written
about engines here.

    python scripts/tools/engines_table.py

Rewrites the tables where they are out of date. `tests/engines/test_engine_rows.py` fails until that
was done.
"""

from pathlib import Path
from typing import NamedTuple

from rotationzoo.codec.engine_needs import ENGINE_NAMES, ENGINES, Entry
from rotationzoo.codec.formats import BUDGETED

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
PICKED = [
    "`--for`",
    "recipe",
    "rotations",
    "means",
    "clip ratios",
    "exact windows",
    "codes",
    "format",
    "earlier chunks keep exact",
    "how it is started",
]
FILES = [
    "engine",
    "where it has OSCAR's 2-bit cache",
    "reads",
    "what is not served, or done in its own way",
]
CLIP_RATIOS = {
    "none": "none", "one": "one", "side": "one for keys, one for values", "head": "all"
}  # fmt: skip
EARLIER = {"server": "the first tokens", "window": "the first tokens and the window"}


class Description(NamedTuple):
    """What the page says about an engine besides its row in the registry, in Markdown."""

    cache: str
    """The fork or pull request that implements its 2-bit cache."""
    reads: str
    """The files that it reads."""
    limits: str
    """Other things that it cannot serve or does differently."""


DESCRIPTIONS = {
    "vllm-oscar": Description(
        cache="[pull request 46774](https://github.com/vllm-project/vllm/pull/46774)",
        reads="`.pt` pair, version 1",
        limits="groups smaller than the head; head dimensions that differ",
    ),
    "sglang": Description(
        cache="[OSCAR's SGLang](https://github.com/FutureMLS-Lab/OSCAR), "
        "[pull request 32129](https://github.com/sgl-project/sglang/pull/32129)",
        reads="`.pt` pair: version 2 (per KV head), 1 (`--pooled`), 3 (key mean)",
        limits="head dimensions and groups that are no power of two; windows that are no multiple "
        "of 8",
    ),
    "sglang-mla": Description(
        cache="[OSCAR's SGLang](https://github.com/FutureMLS-Lab/OSCAR)",
        reads="a folder with `layer_N.pt` for each layer, one bare matrix each",
        limits="clips; latents of another size than 512 are not packed; its codes round halves to "
        "even",
    ),
    "modelopt": Description(
        cache="none: formats of 8 and 4 bits by layer, in "
        "[pull request 56116](https://github.com/vllm-project/vllm/pull/56116)",
        reads="`kv_cache_quantized_layers` in `hf_quant_config.json`",
        limits="everything but the choice of layers; keys and values apart",
    ),
    "llama.cpp": Description(
        cache="[OSCAR's fork](https://github.com/FutureMLS-Lab/OSCAR/tree/zhongzhu/llamacpp) "
        "(`qwen3`), "
        "[llama-cpp-turboquant](https://github.com/TheTom/llama-cpp-turboquant/pull/234) "
        "(`qwen3moe`, `qwen35`, `gemma4`)",
        reads="tensors in a copy of the model's GGUF",
        limits="groups (its blocks are its own); other architectures; "
        "in the second fork clips and exact windows",
    ),
}


def tables() -> list[str]:
    """Both tables in Markdown: what `--for` picks for each engine, and the files that engines
    read."""
    picked = [_picks(name) for name in ENGINE_NAMES]
    files = [_files(name) for name in ENGINE_NAMES if ENGINES[name].module]
    return [_markdown(PICKED, picked), _markdown(FILES, files)]


def current_tables(page: str) -> list[str]:
    """The tables that the page has: from their headers to the first line that is no row."""
    begins = [page.index(f"| {columns[0]} | {columns[1]} |") for columns in (PICKED, FILES)]
    return [page[begin : page.index("\n\n", begin) + 1] for begin in begins]


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    every = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in every)


def _picks(name: str) -> list[str]:
    entry = ENGINES[name]
    start = f"`rotationzoo {entry.command}`" if entry.command else "`export` prints it"
    format = f"`{entry.format}`" if entry.format else "its own, not simulated"
    if entry.budget and entry.format:
        format += f", or `{BUDGETED}` with a budget of bits"
    return [
        f"`{name}`",
        f"`{entry.recipe}`",
        _rotations(entry),
        _means(entry),
        CLIP_RATIOS[entry.clip],
        "the artifact's" if entry.windows else "none",
        "error feedback" if entry.feedback else "nearest",
        format,
        EARLIER[entry.prefill_layout] if entry.windows else "nothing",
        start,
    ]


def _rotations(entry: Entry) -> str:
    if "key" not in entry.takes:
        return "of latents"
    if not entry.rotates:
        return "none: the bits of layers alone"
    rotations = "per KV head" if entry.heads else "per layer"
    if "latent" in entry.on_cpu:
        return f"{rotations}, or of latents on a CPU"
    return f"{rotations}, or of latents" if "latent" in entry.takes else rotations


def _means(entry: Entry) -> str:
    names = [f"{side}s" for side in entry.every_side if side in entry.means]
    return ", ".join(names) or "none"


def _files(name: str) -> list[str]:
    return [f"`{name}`", *DESCRIPTIONS[name]]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for old, new in zip(current_tables(text), tables(), strict=True):
        text = text.replace(old, new)
    PAGE.write_text(text, encoding="utf-8")
