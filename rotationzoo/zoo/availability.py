"""Whether the hubs still hold the files that an index lists."""

from functools import cache

from rotationzoo.errors import HubError
from rotationzoo.zoo.hubs.registry import open_hub
from rotationzoo.zoo.index import Copy, Entry
from rotationzoo.zoo.lookup import LoadedIndex


def check_availability(loaded: LoadedIndex, entries: list[Entry]) -> list[bool | None]:
    """For each entry, whether some hub lists all of its files.

    None means unknown: no hub that answered has the files, but another hub did not answer.
    """

    # Many entries share a zoo repository, so each repository is listed only once.
    @cache
    def list_paths(hub_name: str, repo: str, revision: str | None) -> set[str] | None:
        try:
            return set(open_hub(hub_name).list_files(repo, revision))
        except HubError as error:
            return set() if error.missing else None

    def is_available(entry: Entry) -> bool | None:
        is_unknown = False
        for copy in entry.copies:
            paths = list_paths(copy.hub, copy.repo, loaded.revision_of(copy))
            if paths is None:
                is_unknown = True
            elif _is_complete(entry, copy, paths):
                return True
        return None if is_unknown else False

    return [is_available(entry) for entry in entries]


def _is_complete(entry: Entry, copy: Copy, paths: set[str]) -> bool:
    """Whether a repository with these paths has the copy's folder and all files of the entry."""
    # An entry that cannot be pulled may name no files, and its folder may be the whole repository.
    folder = copy.path_of("")
    has_folder = any(path.startswith(folder) for path in paths)
    return has_folder and all(copy.path_of(name) in paths for name in entry.files)
