"""Web addresses of published files, and the command that fetches them: what a list links to."""

import shlex
from dataclasses import dataclass
from urllib.parse import quote

from rotationzoo.artifact.store import CARD, REPORT
from rotationzoo.zoo.hubs.registry import HUBS
from rotationzoo.zoo.index import Copy, Entry
from rotationzoo.zoo.lookup import LoadedIndex


@dataclass(frozen=True)
class Link:
    """A web address with its words."""

    words: str
    url: str


def copy_links(loaded: LoadedIndex, entry: Entry, copy: Copy) -> list[Link]:
    """Where one copy of an entry can be read: its card and its report, or else its repository.

    What an index says is quoted: names may have letters of any script.
    """
    hub = HUBS[copy.hub]
    revision = loaded.revision_of(copy) or hub.main

    def address(template: str, path: str = "") -> str:
        parts = {"repo": copy.repo, "revision": revision, "path": path}
        return template.format(**{name: quote(part) for name, part in parts.items()})

    links = []
    if CARD in entry.files:
        links.append(Link("card", address(hub.file_page, copy.path_of(CARD))))
    if REPORT in entry.files:
        links.append(Link("report", address(hub.file, copy.path_of(REPORT))))
    return links or [Link("repository", address(hub.repo_page))]


def pull_command(loaded: LoadedIndex, entry: Entry, place: list[str]) -> str | None:
    """The command that fetches an entry; None for one that is only listed.

    `place`: the options that name the index, as `["--repo", "owner/zoo"]`.
    """
    if not entry.pullable:
        return None
    words = ["rotationzoo", "pull", entry.model, "--recipe", entry.recipe]
    if entry.rope_scaling:
        words += ["--rope-scaling", entry.rope_scaling]
    alike = [other for other in loaded.content.entries if _wanted(other) == _wanted(entry)]
    if len(alike) > 1 and entry.model_revision:
        words += ["--revision", entry.model_revision]
    return shlex.join([*words, *place])


def _wanted(entry: Entry) -> tuple[str, str, str | None]:
    """What a `pull` command without a revision tells apart."""
    return entry.model, entry.recipe, entry.rope_scaling
