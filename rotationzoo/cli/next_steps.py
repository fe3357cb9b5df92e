"""The commands that output and hints name: the running one, and those to run next."""

import shlex
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotationzoo.cli.output import Output, say
from rotationzoo.codec.engine_needs import ENGINES
from rotationzoo.errors import UsageError
from rotationzoo.words import counted

if TYPE_CHECKING:
    from rotationzoo.artifact.scores import Decision
    from rotationzoo.artifact.store import Artifact

_words: ContextVar[tuple[str, ...]] = ContextVar("words", default=())


def remember_words(words: Sequence[str]) -> None:
    """Remember the words after `rotationzoo` on the command line."""
    _words.set(tuple(words))


def typed_words(*left_out: str) -> list[str]:
    """The words after `rotationzoo` on the command line, without those in `left_out`."""
    return [word for word in _words.get() if word not in left_out]


def retyped(options: Mapping[str, str]) -> list[str]:
    """The same words with these `options` replaced or added; "" leaves one out."""
    kept, words = list[str](), iter(_words.get())
    for word in words:
        if word in options:
            next(words, None)
        elif word.split("=")[0] not in options:
            kept.append(word)
    return [*kept, *(word for pair in options.items() if all(pair) for word in pair)]


def shell_line(*words: str) -> str:
    """A command to copy, quoted for the shell, of the `words` after `rotationzoo`."""
    return shlex.join(["rotationzoo", *words])


def named(model: str, revision: str | None, scaling: str | None = None) -> list[str]:
    """The words that name a model on a command line."""
    words = [model, "--revision", revision] if revision else [model]
    return [*words, "--rope-scaling", scaling] if scaling else words


def served(engine: str | None) -> list[str]:
    """The option for an engine whose format can be measured."""
    return ["--for", engine] if engine and ENGINES[engine].format else []


def show_artifact(
    out: Output, artifact: "Artifact", with_time: bool = True, decision: "Decision | None" = None
) -> None:
    """Print a summary of an artifact, `with_time` of its calibration, and the `decision` on it."""
    manifest, folder = artifact.manifest, str(artifact.folder)
    tokens = manifest.calibration.tokens if manifest.calibration else 0
    data: dict[str, Any] = {
        "artifact": folder,
        "identity": artifact.identity,
        "model": manifest.model.id,
        "revision": manifest.model.revision,
        "recipe": artifact.recipe.name,
        "layers": len(artifact.rotations),
        "tokens": tokens,
        "seconds": manifest.run.seconds,
        "peak_memory_bytes": manifest.run.peak_memory_bytes,
        "orthogonality_error": manifest.metrics.orthogonality_error,
    }
    out.notes(manifest.notes)
    made = f"{manifest.model.id}: rotations of {counted(len(artifact.rotations), 'layer')}"
    if with_time and manifest.imported is None:
        made += f", from {counted(tokens, 'token')} in {manifest.run.seconds:.1f} s"
    if decision is not None:
        data |= {"decision": decision.model_dump()}
    words = decision.words if decision else []
    out.result(data, folder, lambda: say(made, f"Folder: {folder}", *words))


def check_is_model(model: str, command: str, *option: str) -> None:
    """Raise `UsageError` for an artifact as the model; its hint names it after the `option`."""
    if not (Path(model) / "manifest.json").is_file():
        return
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.model.source import model_words

    line = shell_line(command, *model_words(Artifact.open(model)), *option, model)
    raise UsageError(f"{model} has rotations and no model", f"give them with their model: {line}")


def suggest_step(
    out: Output, artifact: "Artifact", model: list[str] | None = None, engine: str | None = None
) -> None:
    """Suggest the report of an evaluated artifact, or else an evaluation for the engine."""
    from rotationzoo.model.source import model_words

    step = ["report", str(artifact.folder)]
    if artifact.manifest.metrics.evaluation is None:
        model = model or model_words(artifact)
        step = ["evaluate", *model, str(artifact.folder), *served(engine), "--save"]
    out.suggest(*step)


def suggest_text(out: Output, folder: Path, model: list[str], *more: str) -> None:
    """Suggest `generate` with `more` options. `model`: the words that name it."""
    prompt = [] if model == ["demo"] else ["--prompt", "TEXT"]
    out.suggest("generate", *model, "--rotations", str(folder), *more, *prompt)
