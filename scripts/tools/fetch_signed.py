"""Fetch every artifact that the index of a zoo repository on Hugging Face lists, for mirror.yml to
copy: a model may have several, of other recipes, scalings of RoPE or revisions.

    python scripts/tools/fetch_signed.py OWNER/NAME OUT --signer IDENTITY

The index and the artifacts must be signed by that identity. Each folder of OUT begins with the day
on which the artifact was published, which `push --published` takes: the newest stays the newest.
"""

import argparse
from pathlib import Path

from rotationzoo.errors import RotationZooError
from rotationzoo.settings import Signatures
from rotationzoo.zoo.lookup import read_index
from rotationzoo.zoo.pull import pull_first
from rotationzoo.zoo.signed_index import check_index
from rotationzoo.zoo.signing import make_demand

HUB = "huggingface"


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("repo")
    parser.add_argument("out", type=Path)
    parser.add_argument("--signer", required=True)
    parser.add_argument("--trust-config", type=Path)
    args = parser.parse_args()
    try:
        fetch_signed(args.repo, args.out, args.signer, args.trust_config)
    except RotationZooError as error:
        raise SystemExit(f"Error: {error}") from error


def fetch_signed(repo: str, out: Path, signer: str, trust_config: Path | None) -> None:
    """Pull each artifact of the repository's own index to a separate folder.

    Raises `RotationZooError` for the first that is not sound or not signed by `signer`.
    """
    asked = Signatures(signers=[signer], require_signature=True, trust_config=trust_config)
    demand = make_demand(asked)
    loaded = read_index(repo, HUB)
    check_index(loaded, demand)
    for entry in loaded.content.entries:
        if entry.format != "rotationzoo":
            continue
        copies = [copy for copy in entry.copies if (copy.hub, copy.repo) == (HUB, repo)]
        folder = out / f"{(entry.created or '')[:10]}__{copies[0].path.replace('/', '__')}"
        pull_first(loaded, entry, copies, folder, demand=demand)
        print(folder)


if __name__ == "__main__":
    main()
