"""The plan of `rotationzoo regenerate --plan --json` as outputs of a GitHub job: the matrix, and
whether it holds anything.

python scripts/plan_matrix.py plan.json [MODEL]
"""

import json
import sys
from pathlib import Path


def main() -> None:
    plan, only = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    due = [
        model for model in json.loads(plan.read_text())["models"] if only in ("", model["model"])
    ]
    rows = [
        {"model": m["model"], "revision": m["revision"], "name": m["model"].replace("/", "__")}
        for m in due
    ]
    print(f"matrix={json.dumps({'include': rows})}")
    print(f"any={'true' if rows else 'false'}")


if __name__ == "__main__":
    main()
