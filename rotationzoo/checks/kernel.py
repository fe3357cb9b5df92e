"""Does the CUDA reference store what the codec defines? Every layer and head of an artifact, bit by
bit, and how fast."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rotationzoo.artifact.layout import side_name
from rotationzoo.artifact.store import Artifact
from rotationzoo.artifact.writer import add_files
from rotationzoo.codec import cuda, int2, throughput
from rotationzoo.errors import RotationZooError
from rotationzoo.linalg.moments import Average
from rotationzoo.model import loading
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.geometry import cached_layers
from rotationzoo.model.source import config_hash, fetch, find
from rotationzoo.progress import Progress, silent
from rotationzoo.recipe import Data, Recipe
from rotationzoo.text.rows import read_corpus

VALIDATION, SOURCE = "validation.json", "int2.cu"
EDGES = 8
_HEAVY_TAIL = 3.0  # degrees of freedom of the Student t that scales drawn rows


def validate(
    artifact: Artifact,
    model: str | None = None,
    revision: str | None = None,
    rows: int = 1024,
    device: str = "auto",
    progress: Progress = silent,
    speed: bool = True,
) -> dict[str, Any]:
    """Check `rows` drawn rows and some edge rows of every layer, KV head and side, and captured
    ones with `model`; measure the `speed`; add `validation.json` and `int2.cu` to the artifact and
    return the report.

    Raises `RotationZooError` with layer, head, row and both values where the two differ. Without a
    GPU the definition alone is checked, which the report says, and the artifact stays as it is.
    """
    on_gpu = loading.torch_device(device) == "cuda"
    if on_gpu:
        artifact.check_writable()
    recipe, rotations, statistics = artifact.recipe, artifact.rotations, artifact.statistics
    layers = cached_layers(artifact.geometry)
    captured = _captured(artifact, model, revision, rows, device) if model else {}
    check = _Check(recipe, on_gpu)
    done, total = 0, 2 * len(layers)
    for layer in layers:
        for side, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            rotation = rotations[layer.index][side]
            moments = None if statistics is None else statistics[layer.index][side]
            drawn = draw(moments, layer.kv_heads, rows, dim, seed=done)
            if (layer.index, side) in captured:
                drawn = torch.cat([drawn, captured[layer.index, side]], dim=1)
            if rotation.mean is not None:
                drawn = drawn - rotation.mean[:, None]
            name = side_name(layer.index, side)
            check(name, drawn, rotation.matrix.expand(layer.kv_heads, -1, -1), rotation.clip)
            progress("validating", done := done + 1, total)
    report = check.report() | {
        "identity": artifact.identity,
        "captured_from": model and find(model, revision).label,
    }
    if not on_gpu:
        return report
    if speed:
        progress("measuring", 0, 0)
        report |= throughput.measure(
            layers[0].key_dim, recipe.group_size, artifact.clip_ratios["key"]
        )
    files = {
        VALIDATION: (json.dumps(report, indent=2) + "\n").encode(),
        SOURCE: cuda.SOURCE.read_bytes(),
    }
    summary = {
        key: report[key] for key in ("on_gpu", "device", "rows", "codes_equal", "dequantized_equal")
    }
    add_files(artifact, files, {"validation": summary})
    return report


def check_device(folder: Path, device: str) -> None:
    """Raise `RotationZooError` where nobody asked for a CPU and there is nothing else: what would
    be checked is less."""
    if device == "auto" and loading.torch_device(device) != "cuda":
        raise RotationZooError(
            f"{folder} is not validated: the CUDA reference needs an NVIDIA GPU, and there is none here",
            hint="run the same command on a machine with one; --device cpu checks the codec's definition alone",
        )


def draw(moments: Average | None, heads: int, rows: int, dim: int, seed: int) -> torch.Tensor:
    """Rows `[heads, rows, dim]` float32 with the given mean `[H, D]` and second moment `[H, D, D]`
    (None: standard normal) and heavy tails: each row is scaled by its own Student t."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(heads, rows, dim, generator=generator, dtype=torch.float64)
    chi2 = (
        torch.randn(heads, rows, int(_HEAVY_TAIL), generator=generator, dtype=torch.float64)
        .square()
        .sum(-1, keepdim=True)
    )
    tail = (_HEAVY_TAIL / chi2).sqrt()
    if moments is None:
        return (normal * tail).float()
    mean, second = moments.mean, moments.second_moment
    assert mean is not None, "keys and values of a calibration have a mean"
    eigenvalues, vectors = torch.linalg.eigh(second - mean.unsqueeze(-1) * mean.unsqueeze(-2))
    root = vectors * eigenvalues.clamp(min=0).sqrt().unsqueeze(-2)
    return (mean.unsqueeze(1) + tail * (normal @ root.mT)).float()


def edge_rows(dim: int, largest: float) -> torch.Tensor:
    """Rows `[EDGES, dim]` at the borders of the codec's domain, none above `largest`: zero,
    constant, one spike, subnormal, as large as can be, a tiny range on a large offset, and the
    codes' own grid."""
    rows = torch.zeros(EDGES, dim)
    rows[1] = 0.37
    rows[2, dim // 3] = -5.0
    rows[3] = 1e-40 * torch.arange(dim)
    rows[4] = largest * torch.linspace(-1, 1, dim)
    rows[5] = largest
    rows[6] = 1000 + 1e-3 * torch.arange(dim)
    rows[7] = torch.arange(dim) % 4
    return rows


@dataclass
class _Check:
    """Compares the CUDA kernels with their definition on one side of one layer after the other."""

    recipe: Recipe
    on_gpu: bool
    rows: int = 0
    elements: int = 0
    rotation_error: float = 0.0
    name: str = field(default="", init=False)

    def __call__(
        self, name: str, rows: torch.Tensor, rotation: torch.Tensor, clip: torch.Tensor
    ) -> None:
        """`rows` `[H, N, D]` unrotated, `rotation` `[H, D, D]`, `clip` `[H]`."""
        self.name = name
        self.rows += rows.shape[0] * rows.shape[1]
        if not self.on_gpu:
            self._definition(rows, rotation, clip)
            return
        rotated = torch.empty(rows.shape, device="cuda")
        narrow = rows.bfloat16()
        for form in int2.FORMATS.values():
            packed = cuda.quantize(
                narrow.cuda(), clip, self.recipe.group_size, form, rotation.cuda(), rotated
            )
            self._within_bound("rotation", rotated.cpu(), narrow, rotation)
            expected = self._equal(packed, rotated.cpu(), clip, form)
            back = cuda.dequantize(packed, torch.float32, rotation.cuda()).cpu()
            self._within_bound(
                "inverse rotation", back, int2.dequantize(expected, form), rotation.mT
            )
            for typed in _typed(rotated.cpu()):
                self._equal(
                    cuda.quantize(typed.cuda(), clip, self.recipe.group_size, form),
                    typed,
                    clip,
                    form,
                )

    def report(self) -> dict[str, Any]:
        equal = True if self.on_gpu else None  # a difference has raised
        return {
            "device": torch.cuda.get_device_name() if self.on_gpu else "cpu",
            "on_gpu": self.on_gpu,
            "rows": self.rows,
            "elements": self.elements,
            "codes_equal": equal,
            "dequantized_equal": equal,
            "max_difference": 0.0 if self.on_gpu else None,
            "rotation_error": self.rotation_error,
            "formats": list(int2.FORMATS),
            "quantize_bytes_per_second": None,
            "dequantize_bytes_per_second": None,
            "copy_bytes_per_second": None,
        }

    def _equal(
        self, packed: cuda.Packed, rows: torch.Tensor, clip: torch.Tensor, form: int2.Format
    ) -> int2.Quantized:
        """What the kernel made of these rows is what the definition makes of them."""
        expected = int2.quantize(rows, clip[:, None], self.recipe.group_size, form)
        codes = int2.unpack(packed.codes.cpu(), form.packing)
        self._same("code", codes, expected.codes)
        self._same(
            "scale or offset",
            packed.metadata.cpu(),
            torch.stack([expected.scale, expected.offset], dim=-1),
        )
        for dtype in cuda.TYPES:
            values = cuda.dequantize(packed, dtype).cpu()
            self._same("dequantized value", values, int2.dequantize(expected, form).to(dtype))
        self.elements += rows.numel()
        return expected

    def _same(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
        different = (found.view(integer) != expected.view(integer)).nonzero()
        if len(different):
            head, row = different[0, :2].tolist()
            where = tuple(different[0].tolist())
            raise RotationZooError(
                f"{self.name}, head {head}, row {row}: the kernel's {what} is {found[where].item()!r} and the definition's "
                f"is {expected[where].item()!r} ({len(different)} differ)",
                hint="do not publish; report the GPU, the driver and this line as an issue",
            )

    def _within_bound(
        self, what: str, found: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor
    ) -> None:
        """A float32 product of D terms is off by at most D 2^-24 |x| |R| (Higham 2002, section
        3.1)."""
        rows, matrix = rows.double(), matrix.double()
        bound = rows.shape[-1] * 2.0**-24 * (rows.abs() @ matrix.abs()) + 1e-37
        error = (found.double() - rows @ matrix).abs() / bound
        worst = error.max().item()
        self.rotation_error = max(self.rotation_error, worst)
        if not worst <= 1:
            head, row = (error == worst).nonzero()[0, :2].tolist()
            raise RotationZooError(
                f"{self.name}, head {head}, row {row}: the kernel's {what} is off by {worst:.2g} times what float32 allows",
                hint="do not publish; report the GPU, the driver and this line as an issue",
            )

    def _definition(self, rows: torch.Tensor, rotation: torch.Tensor, clip: torch.Tensor) -> None:
        """What holds of the definition itself: packing loses nothing, errors stay within half a
        step, rotations undo."""
        rotated = rows @ rotation
        self._within_bound("rotation", rotated, rows, rotation)
        for form in int2.FORMATS.values():
            stored = int2.quantize(rotated, clip[:, None], self.recipe.group_size, form)
            self._same(
                "packed code",
                int2.unpack(int2.pack(stored.codes, form.packing), form.packing),
                stored.codes,
            )
            self.elements += rows.numel()


def _typed(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows `[H, N, D]` in every type that the kernel takes, behind edge rows."""
    for dtype in cuda.TYPES:
        largest = (
            min(int2.LARGEST, torch.finfo(dtype).max) * 0.99
        )  # rounding to bfloat16 may add a part in 256
        edges = edge_rows(rows.shape[-1], largest).expand(len(rows), -1, -1)
        yield torch.cat([edges, rows.clamp(-largest, largest)], dim=1).to(dtype)


def _captured(
    artifact: Artifact, model: str, revision: str | None, rows: int, device: str
) -> dict[tuple[int, str], torch.Tensor]:
    """Post-RoPE keys and values `[H, rows, D]` of the artifact's own model on the bundled text, by
    layer and side."""
    source = find(model, revision)
    if config_hash(source) != artifact.manifest.model.config_sha256:
        raise RotationZooError(
            f"{artifact.folder} was not made for {model} but for {artifact.manifest.model.id}",
            hint="give the model that it was made for with --model",
        )
    config = loading.load_config(source)
    fetch(source)
    target = loading.torch_device(device)
    loaded = loading.load(
        source, config, target, loading.torch_dtype("auto", device, None), predicts=False
    )
    text = read_corpus(Data(tokens=rows, length=min(rows, 1024)), loading.load_tokenizer(source))
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}

    def observe(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        for side, tensor in (("key", key), ("value", value)):
            seen.setdefault((layer, side), []).append(
                tensor.float().cpu().transpose(0, 1).flatten(1, 2)
            )

    with torch.no_grad(), capture(loaded, observe):
        for ids in text.batches(1):
            decoder(loaded)(input_ids=ids.to(target), use_cache=False)
    return {place: torch.cat(parts, dim=1) for place, parts in seen.items()}
