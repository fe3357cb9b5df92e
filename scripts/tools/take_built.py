"""Take the artifacts that a workflow built, a folder per row of the matrix, for the publisher to
sign.

    python scripts/tools/take_built.py MATRIX BUILT OUT

Builders parse files that strangers published, and each may have written anything into the folder of
its row, and elsewhere. So a folder is taken only if it is a whole artifact with nothing else in it,
made for the model and the revision of its row. A folder without a row, or a wrong one, stops all. A
row whose build failed has no folder.
"""

import json
import os
import sys
from pathlib import Path

from rotationzoo.artifact.store import Artifact
from rotationzoo.checks.verify import verify
from rotationzoo.errors import RotationZooError


def main() -> None:
    matrix, built, out = sys.argv[1:]
    try:
        names = take_built(json.loads(matrix)["include"], Path(built), Path(out))
    except RotationZooError as error:
        raise SystemExit(f"Error: {error}") from error
    print(f"Took {', '.join(names)}")


def take_built(rows: list[dict[str, str]], built: Path, out: Path) -> list[str]:
    """Check every folder of `built`, then move it to `out` under the name of its row.

    Returns the names. Raises `RotationZooError` for a folder that is not to be signed, and if there
    is none; nothing is moved then.
    """
    expected = {f"rotations-{row['name']}": row for row in rows}
    folders = sorted(built.iterdir())
    for folder in folders:
        if folder.name not in expected:
            raise RotationZooError(f"{folder} is of no model that was due")
        _check(folder, expected[folder.name])
    if not folders:
        raise RotationZooError("nothing was built")
    out.mkdir()
    for folder in folders:
        os.rename(folder, out / expected[folder.name]["name"])
    return [expected[folder.name]["name"] for folder in folders]


def _check(folder: Path, row: dict[str, str]) -> None:
    """Raise `RotationZooError` unless the folder is an artifact of the row's model and revision."""
    artifact = Artifact.open(folder)
    made_for = artifact.manifest.model
    if (made_for.id, made_for.revision) != (row["model"], row["revision"]):
        raise RotationZooError(
            f"{folder} says that it was made for revision {made_for.revision} of {made_for.id}, "
            f"and not for {row['revision']} of {row['model']}"
        )
    verification = verify(artifact, row["model"], row["revision"])
    if verification.problems:
        raise RotationZooError(f"{folder} is not to be signed: {verification.problems[0]}")


if __name__ == "__main__":
    main()
