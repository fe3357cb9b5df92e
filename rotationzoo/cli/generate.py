"""`rotationzoo generate`: write text with a model whose cache stores 2 bits."""

import os
import shlex
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotationzoo.cli.next_steps import check_is_model, served, suggest_step
from rotationzoo.cli.output import Output, say, write_text
from rotationzoo.cli.progress_bar import TextScreen
from rotationzoo.errors import Interrupted, RotationZooError, UsageError
from rotationzoo.settings import GenerationSettings
from rotationzoo.settings_base import option
from rotationzoo.words import byte_count, counted

if TYPE_CHECKING:
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.model.source import Source

_SHOWN = 24  # characters of each text after the place where they diverge
_LONGEST = 16 << 20  # bytes of a prompt; English has about four a token
_HINT = 'give a text with --prompt "TEXT" or --file FILE, or pipe it into the command'
_ANSWER = 19  # tokens of the line that the demo's own prompt begins


def generate_command(
    settings: GenerationSettings,
    out: Output,
    file: Path | None = option("A file with that text, or - for a pipe.", "--file", "-f"),
) -> None:
    """Write text with a model whose cache is stored in 2 bits.

    rotationzoo generate demo

    rotationzoo generate Qwen/Qwen3-8B --chat --prompt "Why is the sky blue?"

    rotationzoo generate Qwen/Qwen3-8B --rotations rotations/Qwen3-8B-transform --compare < long.txt
    """
    if out.quiet and settings.compare and not out.json:
        raise UsageError("--quiet prints one text, and --compare makes two", "--json prints both")
    text, new = _read_prompt(settings.prompt, file), settings.max_new_tokens
    model, rotations = settings.model, settings.rotations
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.generation.generate import check_settings, generate
    from rotationzoo.model.source import DEMO, find

    if rotations is None:
        check_is_model(model, "generate", "--rotations")
    is_demos_own = text is None and model == "demo"
    if is_demos_own:
        text, new = (DEMO.parent / "prompt.txt").read_text("utf-8"), new or _ANSWER
    if text is None:
        raise UsageError("there is no prompt", _HINT)
    named = None if rotations == "none" else rotations
    job = replace(settings, prompt=text, rotations=named, max_new_tokens=new)
    check_settings(job)  # before rotations are looked for
    if rotations is None:
        source = find(model, settings.revision)
        artifact = find_rotations(out, source)
        if artifact is None:
            raise no_rotations(source)
        job = replace(job, rotations=artifact)
    with TextScreen(out) as screen:
        write = None if out.json else screen.write
        report = generate(job, screen.progress, write, lambda text: out.notes([text]))
    if is_demos_own:
        out.tell(f"the demo completes a line that its prompt has: {text.splitlines()[-1]}")
    if out.json or not out.quiet:  # quiet prints the text alone, and that was written
        out.result(report, "", lambda: _say_generation(out, report))
    if "interrupted" in (report["stop"], report.get("exact_stop")):
        raise Interrupted(f"interrupted after {counted(report['tokens'], 'token')}")
    if job.rotations is None:
        out.suggest("calibrate", model, *served(settings.engine))
    else:
        suggest_step(out, Artifact.open(report["rotations"]), [model], settings.engine)


def find_rotations(
    out: Output, source: "Source", fits: Callable[[str | None], bool] = lambda scaling: True
) -> "Artifact | None":
    """The newest artifact in the folder `rotations` that this user made or pulled for a model and
    whose scaling of RoPE `fits`, with a note that names it. Raises `UsageError` if only other
    people's artifacts fit: they may come with an archive or a repository."""
    from rotationzoo.artifact.manifest import ROTATIONS, hash_config
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.writer import is_remembered

    fitting, expected = [], hash_config(source.folder)
    for manifest in sorted(Path("rotations").glob("*/manifest.json")):
        with suppress(RotationZooError):
            artifact = Artifact.open(manifest.parent)
            same_config = artifact.manifest.model.config_sha256 == expected
            if same_config and fits(artifact.recipe.rope_scaling):
                fitting.append(artifact)
    if not fitting:
        return None
    own = [each for each in fitting if is_remembered(each)]
    if not own:
        place = fitting[0].folder
        hint = f"if you trust it, add: --rotations {shlex.quote(str(place))}"
        raise UsageError(f"{place} was neither calibrated nor pulled by you on this machine", hint)
    # `evaluate --save` rewrites manifests, and not these files.
    newest = max(own, key=lambda each: (each.folder / ROTATIONS).stat().st_mtime_ns)
    if not out.quiet:
        others = f", the newest of {len(own)}" if len(own) > 1 else ""
        out.note(f"Rotations: {newest.folder}{others}")
    return newest


def no_rotations(source: "Source") -> UsageError:
    """The error for a model without rotations."""
    hint = f"make some with: rotationzoo calibrate {shlex.quote(source.name)}"
    if source.revision is not None:  # a hub model, for which the zoo may have rotations
        hint = f"pull some from the zoo, or {hint}"
    return UsageError(f"there are no rotations of {source.name} in the folder rotations", hint)


def _say_generation(out: Output, report: dict[str, Any]) -> None:
    exact, parted = report.get("exact_text", ""), report.get("parted_at")
    if parted is not None:
        start = parted["character"]
        say("", "The exact model writes:")
        write_text(exact.removesuffix("\n") + "\n")
        same = f"{counted(start, 'character')} ({counted(parted['token'], 'token')})"
        both = f"here {_quote(report['text'], start)}, exact {_quote(exact, start)}"
        say("", f"The two diverge after {same}: {both}.")
    elif "exact_text" in report:
        say(f"The exact model writes the same {counted(report['exact_tokens'], 'token')}.")
    out.note(_summary(report))


def _quote(text: str, start: int) -> str:
    rest = text[start : start + _SHOWN]
    return dumps(rest, ensure_ascii=False) if rest else "the text ends"


def _summary(report: dict[str, Any]) -> str:
    """Speed and memory in one line."""
    words = counted(report["tokens"], "token")
    if report["tokens_per_second"] is not None:
        words += f" at {report['tokens_per_second']:,.1f} a second"
    words += f"; prompt of {report['prompt_tokens']:,}"
    if report["prompt_tokens_per_second"] is not None:
        words += f" at {report['prompt_tokens_per_second']:,.0f} a second"
    held, exact = report["cache_bytes"], report["bf16_cache_bytes"]
    words += f"; cache {byte_count(held)}, and {byte_count(exact)} in bf16"
    if held and exact > held:
        words += f" ({exact / held:.1f} times smaller)"
    # The cache holds all tokens but the last one.
    if report["prompt_tokens"] + report["tokens"] - 1 <= report["sink"] + report["recent"]:
        words += "; a context this short stays exact"
    return words if report["rotations"] else f"{words}; no rotation"


def _read_prompt(text: str | None, file: Path | None) -> str | None:
    """The prompt, or None. Raises `UsageError` for two prompts, and for what is not text."""
    if text is not None and file is not None:
        raise UsageError("--prompt and --file exclude each other", hint="leave out one of them")
    if text is not None:
        # Arguments that are not UTF-8 reach Python as lone surrogates, which no tokenizer takes.
        return _checked(os.fsencode(text), "--prompt")
    name, content = "standard input", b""
    if file is not None and str(file) != "-":
        name = str(file)
        try:
            with file.expanduser().open("rb") as opened:
                content = opened.read(_LONGEST + 1)
        except OSError as error:
            raise UsageError(f"{file} cannot be read: {error.strerror}", hint=_HINT) from error
    elif file is None and not _is_piped():
        return None
    elif sys.stdin is not None:
        content = sys.stdin.buffer.read(_LONGEST + 1)
    # Editors and `echo` end with a newline, after which a model would start a new line.
    return _checked(content, name).removesuffix("\n").removesuffix("\r")


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, not a terminal or /dev/null."""
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # None, closed, or not of this process
        return False


def _checked(content: bytes, name: str) -> str:
    if len(content) > _LONGEST:
        raise UsageError(f"{name} has more than {_LONGEST >> 20} MiB", hint="give a shorter prompt")
    if not content.strip():
        raise UsageError(f"{name} is empty", hint=_HINT)
    if b"\0" in content:
        raise UsageError(f"{name} is not text: it has zero bytes", hint=_HINT)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "convert it, for example with: iconv -f latin1 -t utf-8"
        raise UsageError(f"{name} is not UTF-8: byte {error.start} is wrong", hint) from error
