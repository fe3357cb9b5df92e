"""The public function `pull`: the published rotations of a model, by its name."""

import logging
from pathlib import Path
from typing import Unpack

from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError
from rotationzoo.zoo.hubs.registry import HUB_NAMES
from rotationzoo.zoo.lookup import choose_entry, find_index
from rotationzoo.zoo.pull import pull_first
from rotationzoo.zoo.signed_index import check_index
from rotationzoo.zoo.signing.check import SignatureOptions, make_demand


def pull(
    model: str,
    *,
    recipe: str | None = None,
    revision: str | None = None,
    repo: str | None = None,
    hub: str = "any",
    folder: str | Path | None = None,
    **signatures: Unpack[SignatureOptions],
) -> Artifact:
    """Fetch published rotations, check every hash, and log what is known of the signature.

    * `model`: the model whose rotations to fetch, such as `Qwen/Qwen3-8B`;
    * `recipe`: only rotations of this recipe; those for scaled RoPE are the last choice without it;
    * `revision`: the model revision that the rotations must be made for; by default the newest;
    * `repo`: the repository of a zoo, as `owner/name`; by default that of this project;
    * `hub`: the hub to fetch from, such as `huggingface`; by default any of them;
    * `folder`: where to put the files; by default the cache of huggingface_hub;
    * `signatures`: who must have signed them; see `SignatureOptions`.

    Raises `RotationZooError` where no rotations match, for files that differ from what the index
    lists, and for a signature that is wrong or not as asked.
    """
    demand = make_demand(**signatures)
    hubs: list[str] = list(HUB_NAMES) if hub == "any" else [hub]
    index = find_index(None, repo, hubs[0])
    check_index(index, demand)
    entry, copies, _ = choose_entry(index, model, revision, recipe, hubs)
    target = None if folder is None else Path(folder)
    pulled = pull_first(index, entry, copies, target, demand=demand)
    if pulled.signature is not None:
        level = logging.INFO if pulled.signature.state == "signed" else logging.WARNING
        logging.getLogger("rotationzoo").log(level, "%s", pulled.signature.note)
    # Files that OSCAR's makers published have no manifest, so they are not an artifact yet.
    if pulled.artifact is None:
        raise RotationZooError(
            f"the rotations of {entry.model} in {pulled.copy.repo} are no artifact: {pulled.path}",
            hint=f"make one of them: rotationzoo import {pulled.path} --model {entry.model}",
        )
    return pulled.artifact
