"""The folder of an export: put in place whole, beside what else is in an earlier one."""

from contextlib import suppress
from pathlib import Path

from rotationzoo.engines.formats.oscar_lock import earlier_markers
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import regular_file, sha256, size_of
from rotationzoo.storage.folders import carry_over, check_name, install

RECORD = "export.json"


class _Record(strict_json.Strict):
    """`export.json`, as far as a later export asks it."""

    files: dict[str, str]
    """Name -> sha256."""


def check_target(target: Path) -> None:
    """Raise `RotationZooError` where something is that no export wrote: it is not replaced."""
    check_name(target)
    if not target.exists():
        return
    is_empty = target.is_dir() and not any(target.iterdir())
    if not is_empty and size_of(target / RECORD) is None:
        raise RotationZooError(
            f"{target} exists and holds other files", hint="choose another place with --output"
        )


def install_export(work: Path, target: Path) -> None:
    """Put the folder in place. What the user put into an earlier one is kept; what that export
    wrote is not: engines find the files of one export, never of two."""
    if target.is_dir():
        written = {path.name for path in work.iterdir()}
        replaced = {*written, *_earlier_files(target), *earlier_markers(target)}
        carry_over(target, work, replaced)
    install(work, target)


def _earlier_files(target: Path) -> list[str]:
    """Names of the files that the earlier export wrote and nobody has changed since. Who wrote the
    record is not known: a name counts only with the hash of its file."""
    try:
        content = strict_json.read(target / RECORD)
        record = strict_json.validate(_Record, content, str(target / RECORD))
    except RotationZooError:
        return []
    names = []
    for name, known in record.files.items():
        with suppress(RotationZooError):
            if sha256(regular_file(target, name)) == known:
                names.append(name)
    return names
