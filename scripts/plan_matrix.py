"""Turn the plan of `rotationzoo regenerate --plan --json` into outputs of a GitHub job: the matrix
of models that are due, and whether there are any.

    python scripts/plan_matrix.py plan.json [MODEL]
"""

import json
import sys
from pathlib import Path


def main() -> None:
    plan, only = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    rows = []
    for due in json.loads(plan.read_text())["models"]:
        model = due["model"]
        if only in ("", model):
            name = model.replace("/", "__")  # of a build artifact, which may have no slash
            rows.append({"model": model, "revision": due["revision"], "name": name})
    print(f"matrix={json.dumps({'include': rows})}")
    print(f"any={json.dumps(bool(rows))}")


if __name__ == "__main__":
    main()
