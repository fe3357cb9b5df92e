"""The settings of `calibrate`, `evaluate` and `generate`: each option is declared here, once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from rotationzoo.budget import Budget
from rotationzoo.codec.options import Bits, CacheOptions, Engine, FormatName, PrefillLayout
from rotationzoo.errors import UsageError
from rotationzoo.progress import Progress
from rotationzoo.recall.questions import TASKS
from rotationzoo.settings_base import Settings, about, argument, as_tuple, flag, option

if TYPE_CHECKING:
    import torch

    from rotationzoo.artifact.store import Artifact
    from rotationzoo.recipe import Recipe

RECIPES = ("transform", "attention", "oscar", "oscar-v1", "hadamard", "random", "identity")
"""The names in `recipe.PRESETS`, the default first."""
MAX_NEW_TOKENS = 256
Write = Callable[[str], None]

# ---- options as text


def parse_windows(text: str | None) -> list[tuple[int, int]] | None:
    """Parse `64/256,128/1024` to pairs of sink and recent tokens. Raises `UsageError`."""
    windows = []
    for part in filter(None, (text or "").split(",")):
        sink, _, recent = part.partition("/")
        if not (sink.strip().isdecimal() and recent.strip().isdecimal() and part.isascii()):
            hint = "write it as: --windows 64/256,128/1024"
            raise UsageError(f"--windows has no sink/recent in {part!r}", hint)
        windows.append((int(sink), int(recent)))
    return list(dict.fromkeys(windows)) or None


def parse_window(text: str) -> tuple[int, int]:
    """Parse `64/256` to one pair of sink and recent tokens. Raises `UsageError`."""
    windows = parse_windows(text) or []
    if len(windows) != 1:
        hint = "write it as: --windows 64/256"
        raise UsageError(f"--windows {text} is not one pair of sink/recent", hint)
    return windows[0]


def parse_clip(text: str) -> tuple[float, float]:
    """Parse `0.96/0.92`, clip ratios of keys and values, or one for both. Raises `UsageError`."""
    try:
        ratios = [float(part) for part in text.split("/")]
    except ValueError:
        ratios = []
    if len(ratios) not in (1, 2) or not all(0 < ratio <= 1 for ratio in ratios):
        words = f"--clip {text} is not a clip ratio above 0 and at most 1"
        raise UsageError(words, hint="write it as: --clip 0.96/0.92")
    return ratios[0], ratios[-1]


def parse_tasks(tasks: str) -> list[str] | None:
    """Parse the names of recall tasks, such as `needles,copy`, `all` (None) or `none`."""
    if tasks == "all":
        return None
    names = tasks.split(",") if tasks != "none" else []
    return list(dict.fromkeys(name.strip() for name in names))


def parse_lengths(lengths: str) -> list[int]:
    """Parse the lengths of prompts, such as `2048,8192`. Raises `UsageError`."""
    parts = [part.strip() for part in lengths.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        words = f"--lengths {lengths} is not a list of numbers of tokens"
        raise UsageError(words, hint="write it as: --lengths 2048,8192")
    return list(dict.fromkeys(map(int, parts)))


def parse_questions(text: str) -> int | Literal["auto"]:
    """Parse a number, or `auto`. Raises `UsageError`."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        hint = "write it as: --questions 64, or auto"
        raise UsageError(f"--questions {text!r} is not a number", hint)
    return "auto" if text == "auto" else int(text)


# ---- options that commands share

ModelName = Annotated[str, argument("A hub id, folder, GGUF file, or demo.")]
Revision = Annotated[str | None, option("Branch, tag or commit of a hub model.")]
RopeScaling = Annotated[str | None, option("Scale RoPE: yarn:4, yarn:4:32768, linear:2.")]
Anyway = Annotated[bool, option("Also take rotations of other weights.")]
OutputFolder = Annotated[
    str | Path | None,
    option("Folder (rotations/MODEL-RECIPE).", "--output", "-o", kind=Path | None),
]
Clip = Annotated[
    tuple[float, float] | None,
    option("Clip ratios of keys and values, as 0.96/0.92, or one for both.", kind=parse_clip),
]
Windows = Annotated[
    tuple[int, int] | None, option("Exact sink and recent tokens, as 64/256.", kind=parse_window)
]
Restart = Annotated[bool, option("Replace an existing artifact.")]
TrustConfig = Annotated[Path | None, option("Keys of a private Sigstore, as a JSON file.")]
TextLength = Annotated[int | None, option("Tokens per text (2048; more for windows).", min=2)]
Tasks = Annotated[
    str | Sequence[str] | None, option(f"{', '.join(TASKS)}, or none (all).", kind=parse_tasks)
]
Lengths = Annotated[
    int | Sequence[int] | None,
    option("Tokens per prompt, as 2048,8192 (--length).", kind=parse_lengths),
]

ArtifactFolder = Annotated[Path, argument("The folder that calibrate wrote.", metavar="ROTATIONS")]
IndexPlace = Annotated[str | None, option("Path of a zoo_index.json.", "--index")]
ZooRepo = Annotated[str | None, option("The zoo: owner/name, or a folder as ./zoo.", "--repo")]


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """How and where a model runs."""

    device: Literal["auto", "cpu", "cuda"] = option("Where to run.", default="auto")
    device_map: str | None = option("auto: spread over GPUs, main memory and disk.")
    max_memory: str | None = option("Limits of that map: 0=20GiB,cpu=60GiB.")
    revision: Revision = None
    dtype: Literal["auto", "bfloat16", "float32"] = option("auto: the model's own.", default="auto")

    @property
    def run_options(self) -> dict[str, Any]:
        """These options alone, by name."""
        return {each.name: getattr(self, each.name) for each in fields(RunSettings)}

    @property
    def torch_device(self) -> str:
        """The device to run on. Raises `UsageError`."""
        from rotationzoo.model.loading import torch_device

        return torch_device(self.device)

    @property
    def torch_dtype(self) -> "torch.dtype | str":
        """The type of the weights. `auto`: float32 on a CPU, or else the checkpoint's."""
        import torch

        if self.dtype != "auto":
            return cast(torch.dtype, getattr(torch, self.dtype))
        only_cpu = self.torch_device == "cpu" and self.device_map is None
        return torch.float32 if only_cpu else "auto"


@dataclass(frozen=True, kw_only=True)
class TextSettings(RunSettings):
    """A model, and the text that it reads."""

    engine: Engine = None
    data: str | None = option("Data set id, .jsonl, .txt or .parquet, or bundled.")
    subset: str | None = option("The data set's configuration.")
    split: str | None = option("The data set's split (train).")
    column: str | None = option("Column of the text or of the chat messages.")
    tokens: int | None = option("Tokens in total (32768).", min=1)
    length: int | None = option("Tokens per row (8192).", min=2)
    seed: int | None = option("Order of the documents (0).")

    @property
    def text(self) -> dict[str, Any]:
        """The text settings that were given, by the keys of a recipe's `data`."""
        names = ("subset", "split", "column", "tokens", "length", "seed")
        chosen = {"source": self.data, **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings(TextSettings):
    """The settings of `rotationzoo.calibrate`, which describes each of them."""

    model: ModelName = field(kw_only=False)
    recipe: "str | Recipe | None" = option(
        f"{', '.join(RECIPES)}, or a YAML file (the engine's).", kind=str | None
    )
    output: OutputFolder = None
    bits: float | None = option("Budget: bits an element; costlier channels get more.")
    key_bits: float | None = option("The same for keys alone.")
    value_bits: float | None = option("The same for values alone.")
    quick: bool = flag("The recipe oscar: 2-bit codes, 2.25 to 3 bits an element with scales.")
    images: str | None = option("Column of images (vision models).")
    audio: str | None = option("Column of audio, as WAV.")
    batch: int | None = option("Rows per forward pass (with a device map, all that fit).", min=1)
    rope_scaling: RopeScaling = None
    restart: bool = flag("Discard a checkpoint and replace rotations.")
    progress: Progress | None = None

    @property
    def budget(self) -> Budget:
        """The budget of bits. Raises `UsageError`."""
        return Budget(self.bits, self.key_bits, self.value_bits)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(TextSettings):
    """The settings of `rotationzoo.evaluate`, which describes each of them."""

    model: ModelName = field(kw_only=False)
    artifacts: "str | Path | Artifact | Sequence[str | Path | Artifact]" = field(
        default=(),
        kw_only=False,
        metadata=about(
            "Folders of rotations.", argument=True, kind=list[Path] | None, metavar="ROTATIONS"
        ),
    )
    save: bool = flag("Add evaluation.json to the rotations.")
    data: str | None = option("Data set id, .jsonl, .txt or .parquet (held-out text).")
    tokens: int | None = option("Tokens in total (16384, fewer for few questions).", min=1)
    length: TextLength = None
    tasks: Tasks = None
    lengths: Lengths = None
    questions: int | Literal["auto"] = option(
        "Per task and length; auto: until decided.", default="auto", kind=parse_questions
    )
    minutes: float | None = option("Stop after about this time.", min=0.1)
    keep: float | None = option("Percent of answers to keep (90), or exit 1.")
    fewest_bits: bool = False
    windows: tuple[int, int] | Sequence[tuple[int, int]] | None = option(
        "Exact sink/recent tokens: 64/256,128/1024.", kind=parse_windows
    )
    format: FormatName = None
    bits: Bits = None
    baselines: str | Sequence[str] | None = None
    rivals: str | Sequence[str] = option(
        "Other engines' caches: fp8,q4_0,exl3-2.",
        default=(),
        kind=lambda text: text.replace(" ", "").split(","),
    )
    pooled: bool | None = option("Also measure one rotation per layer.", "--pooled")
    prefill_chunk: int | None = option("Prefill in chunks of N tokens.", min=1)
    prefill_layout: PrefillLayout = None
    rope_scaling: RopeScaling = None
    batch: int = option("Texts per forward pass.", default=1, min=1)
    anyway: Anyway = False
    progress: Progress | None = None

    @property
    def folders(self) -> list[Path]:
        """The folders of the artifacts."""
        given = [getattr(each, "folder", each) for each in as_tuple(self.artifacts)]
        return [Path(folder).expanduser() for folder in given]


@dataclass(frozen=True, kw_only=True)
class GenerationSettings(CacheOptions, RunSettings):
    """The settings of `rotationzoo.generate`, which describes each of them."""

    model: ModelName = field(kw_only=False)
    prompt: str = field(
        kw_only=False, metadata=about("The text to continue.", "--prompt", "-p", kind=str | None)
    )
    rotations: "str | Path | Artifact | None" = field(
        metadata=about("Their folder, or none (your newest of the model).", kind=str | None)
    )
    chat: bool = flag("The prompt is a user's message to a chat model.")
    max_new_tokens: int | None = option(f"Most tokens to write ({MAX_NEW_TOKENS}).", min=1)
    write: Write | None = None
    compare: bool = flag("Also show what the exact model writes.")
    anyway: Anyway = False
    prefill_chunk: int = option("Prompt tokens read at a time.", min=1, default=2048)
    rope_scaling: RopeScaling = None
    progress: Progress | None = None

    @property
    def new_tokens(self) -> int:
        """The most tokens to write."""
        return MAX_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class Import(Settings):
    """The settings of one import. What neither the files nor the user state is taken from
    `oscar-v1`, the recipe of OSCAR's published fitter."""

    files: Annotated[
        Sequence[Path],
        argument("The two rotation files, or their folder.", kind=list[Path], metavar="FILES"),
    ] = field(kw_only=False)
    output: Annotated[
        Path, option("Folder (rotations/NAME-imported).", "--output", "-o", kind=Path | None)
    ] = field(kw_only=False)
    model: Annotated[str, option("Their model: a hub id or a folder.")] = field(kw_only=False)
    revision: Revision = None
    clip: Clip = None
    windows: Windows = None
    group_size: int | None = option("Channels that share a scale (the whole head).", min=1)
    restart: Restart = False


@dataclass(frozen=True, kw_only=True)
class Signatures(Settings):
    """Options for checking signatures."""

    signers: str | Sequence[str] | None = option(
        "Accept only what this identity or public key (a .pem file) has signed. May be repeated.",
        "--signer",
        kind=list[str] | None,
        metavar="SIGNER",
    )
    issuer: str | None = option("Who vouches for the identity; not needed for GitHub workflows.")
    require_signature: bool = flag("Refuse what is not signed.")
    trust_config: TrustConfig = None


@dataclass(frozen=True, kw_only=True)
class Signing(Settings):
    """Options for signing what is published."""

    sign: str | None = option(
        "keyless, a private key (a .pem file), or none. By default, GitHub Actions jobs with an "
        "identity sign keyless."
    )
    adopt_index: bool = flag("Sign the index even where its entries have other signers or none.")
    trust_config: TrustConfig = None

    @property
    def words(self) -> list[str]:
        """The options as they are typed."""
        words = ["--sign", self.sign] if self.sign else []
        words += ["--trust-config", str(self.trust_config)] if self.trust_config else []
        return words + ["--adopt-index"] * self.adopt_index
