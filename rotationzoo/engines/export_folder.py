"""The folder of an export, which replaces an earlier one as a whole and keeps the user's files."""

from contextlib import suppress
from pathlib import Path

from rotationzoo.engines.formats.oscar_lock import earlier_markers
from rotationzoo.errors import RotationZooError
from rotationzoo.storage import strict_json
from rotationzoo.storage.files import regular_file, sha256, size_of
from rotationzoo.storage.folders import carry_over, check_name, install

RECORD = "export.json"


class _Record(strict_json.Strict):
    """The part of `export.json` that a later export reads."""

    files: dict[str, str]
    """Name -> sha256."""


def check_target(target: Path) -> None:
    """Raise `RotationZooError` if the target exists and no export wrote it."""
    check_name(target)
    if not target.exists():
        return
    is_empty = target.is_dir() and not any(target.iterdir())
    if not is_empty and size_of(target / RECORD) is None:
        raise RotationZooError(
            f"{target} exists and holds other files", hint="choose another place with --output"
        )


def install_export(work: Path, target: Path) -> None:
    """Put the folder `work` in the place of `target`.

    Files that the user added to an earlier export are kept. Files that the earlier export wrote are
    dropped, so that an engine never finds the files of two exports.
    """
    if target.is_dir():
        written = {path.name for path in work.iterdir()}
        replaced = {*written, *_earlier_files(target), *earlier_markers(target)}
        carry_over(target, work, replaced)
    install(work, target)


def _earlier_files(target: Path) -> list[str]:
    """The names of files that the earlier export wrote and nobody has changed since.

    Anybody may have written the record, so a name counts only if the file's hash matches.
    """
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
