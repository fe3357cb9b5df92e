"""Finds the index to read, and chooses a model's entry in it."""

from dataclasses import dataclass
from pathlib import Path

from rotationzoo.errors import HubError, RotationZooError, UsageError
from rotationzoo.recipe.rope import same_scaling
from rotationzoo.recipe.schema import normalize
from rotationzoo.zoo import index
from rotationzoo.zoo.hubs.protocol import DEFAULT_HUB, HUB_NAMES, HUBS, SPELLING_HINT, open_hub
from rotationzoo.zoo.index import Copy, Entry, Index, comparable, kept_words

ZOO = "rotationzoo/zoo"
BUNDLED_INDEX = "bundled"
"""In `--index`, the index that comes with this package."""
_BUNDLED = "the index that came with rotationzoo"


@dataclass(frozen=True)
class LoadedIndex:
    """An index and its origin in words. If it is from a zoo repository, also its hub, repository
    and revision, its bytes (`data`), and its signature, if that was read."""

    content: Index
    origin: str
    hub: str | None = None
    repo: str | None = None
    revision: str | None = None
    data: bytes | None = None
    signature: bytes | None = None

    def locate(self, copy: Copy) -> Copy:
        """The copy, with the path of this index's folder if it is in that."""
        is_here = (copy.hub, copy.repo) == (self.hub, ".")
        return copy.model_copy(update={"repo": self.repo}) if is_here else copy

    def revision_of(self, copy: Copy) -> str | None:
        """The revision of a copy, which may be that of the index in the same repository."""
        is_same = (self.hub, self.repo) == (copy.hub, copy.repo)
        return copy.revision or (self.revision if is_same else None)


def find_index(place: str | None, repo: str | None, hub_name: str = DEFAULT_HUB) -> LoadedIndex:
    """The index at `place` (a path or `bundled`), or of a zoo repository on a hub, or if none is
    named and `ZOO` is missing or hidden, the bundled one. Raises `UsageError` for a URL, and
    `HubError` if the hub cannot be read: anyone may own a repository of that name on another hub.
    """
    if place == BUNDLED_INDEX:
        return LoadedIndex(index.read(index.WHEEL_COPY), _BUNDLED)
    if place is not None:
        if "://" in place:  # do not quote it: a URL may contain a password
            hint = "fetch the file and give its path, or name a zoo's repository with --repo"
            raise UsageError("--index takes a path, not a URL", hint)
        return LoadedIndex(index.read(Path(place).expanduser()), place)
    try:
        return read_index(repo or ZOO, hub_name)
    except HubError as error:
        hint = error.hint or ""
        # Without a token, a hub may not say whether a repository is missing or private.
        if repo is None and (error.missing or error.hidden):
            return LoadedIndex(index.read(index.WHEEL_COPY), f"{_BUNDLED} ({error})")
        if repo is None:
            hint += f"; or read the list that came with rotationzoo: --index {BUNDLED_INDEX}"
        elif error.missing and hub_name == DEFAULT_HUB:
            for name in HUB_NAMES[1:]:
                hint += f"; or, if it is on {HUBS[name].title}, add: --from {name}"
        raise HubError(str(error), hint=hint) from error


def read_index(repo: str, hub_name: str, must_exist: bool = True) -> LoadedIndex:
    """Read the index of a repository, which is empty if it is missing and need not exist. Raises
    `HubError`: if a failure were an empty index, worse rotations could be published."""
    hub, revision = open_hub(hub_name), None
    try:
        revision = hub.resolve(repo)
        data = hub.read(repo, revision, index.NAME)
        if data is None:
            problem = f"{repo} on {HUBS[hub_name].title} has no {index.NAME}"
            raise HubError(problem, SPELLING_HINT, missing=True)
    except HubError as error:
        if must_exist or not error.missing:
            raise
        return LoadedIndex(Index(), f"no index: {error}", hub_name, repo, revision)
    origin = f"the index of {repo} on {hub_name} at {revision}"
    return LoadedIndex(index.parse(data, origin), origin, hub_name, repo, revision, data)


def choose_entry(  # noqa: PLR0913 (what a pull may ask for)
    loaded: LoadedIndex,
    model: str,
    revision: str | None,
    recipe: str | None,
    hubs: list[str],
    rope_scaling: str | None = None,
    engine: str | None = None,
) -> tuple[Entry, list[Copy], str]:
    """The best entry of a model, its copies in the order of `hubs`, and the choice in words.

    Among entries for the scaling of RoPE, the requested revision of the model wins, then an
    artifact, then the one that keeps the most answers to the same questions for the `engine`, then
    the newest. Raises `RotationZooError` without an entry, and `UsageError` for an invalid scaling.
    """
    matching = []
    for entry in loaded.content.entries:
        named = entry.model.lower() == model.lower() and recipe in (None, entry.recipe)
        if named and any(copy.hub in hubs for copy in entry.copies):
            matching.append(entry)
    if not matching:
        which = f" with the recipe {recipe}" if recipe else ""
        hint = "see all of them with: rotationzoo list; or make one with: rotationzoo calibrate "
        raise RotationZooError(f"{loaded.origin} has no rotation for {model}{which}", hint + model)
    chosen, others = _of_scaling(matching, rope_scaling, model)
    exact = [entry for entry in chosen if revision and entry.model_revision == revision]
    entry = max(exact or chosen, key=lambda e: (e.format == "rotationzoo", e.created or ""))
    of_weights = [e for e in exact or chosen if e.weights_fingerprint == entry.weights_fingerprint]
    best, kept = _best_for(engine, of_weights)
    entry, known = best or entry, (best or entry).model_revision
    calibrated_for = f"revision {known}" if known else "an unrecorded revision"
    reason = f"{entry.recipe} for {calibrated_for} of {entry.model}"
    if revision and not exact:
        reason += f": there is none for {revision}, this is the newest"
    if entry.rope_scaling:
        reason += f", with RoPE scaled by {entry.rope_scaling}"
    if others:
        reason += f" (there are also some for --rope-scaling {' and '.join(others)})"
    copies = [copy for hub in hubs for copy in entry.copies if copy.hub == hub]
    return entry, copies, reason + kept


def _best_for(engine: str | None, entries: list[Entry]) -> tuple[Entry | None, str]:
    """The entry that keeps the most answers for an engine, and why; None unless several were
    measured for it with the same questions."""
    fitting = [each for each in entries if each.measured and each.measured.engine == engine]
    ranked = comparable(fitting)
    if engine is None or len(ranked) < 2:
        return None, ""
    ranked.sort(key=lambda each: (each.decision and each.decision.kept) or 0.0, reverse=True)
    shares = [f"{each.recipe} {kept_words(each, ranked)}" for each in ranked]
    return ranked[0], f" (which keeps the most answers for {engine}: {', '.join(shares)})"


def _of_scaling(
    entries: list[Entry], asked: str | None, model: str
) -> tuple[list[Entry], list[str]]:
    """The entries for a scaling of RoPE, by default for none, and the scalings of the others."""
    scalings = list(dict.fromkeys(entry.rope_scaling for entry in entries if entry.rope_scaling))
    if asked is None:
        plain = [entry for entry in entries if entry.rope_scaling is None]
        return (plain, scalings) if plain else (entries, [])
    try:
        wanted = normalize(asked)
    except ValueError as error:
        raise UsageError(f"--rope-scaling {error}", hint="--rope-scaling yarn:4") from error
    # Either of the two may leave the number of positions to the config.
    same = [each for each in scalings if same_scaling(wanted, each) or same_scaling(each, wanted)]
    if not same:
        known = f"its rotations are for: {', '.join(scalings)}" if scalings else "leave it out"
        make = f"rotationzoo calibrate {model} --rope-scaling {wanted}"
        problem = f"there is no rotation for {model} with its RoPE scaled by {wanted}"
        raise RotationZooError(problem, f"{known}; or make one with: {make}")
    return [entry for entry in entries if entry.rope_scaling in same], []
