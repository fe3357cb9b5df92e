"""Asking a zoo for rotations of a model: a recipe file in a pull request, in the visitor's name.

The file is what `rotationzoo regenerate --plan --configs requests` reads.
"""

import itertools
import re
from dataclasses import dataclass

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from planning import check_model

from rotationzoo.errors import HubError, UsageError
from rotationzoo.network.huggingface_session import asking_huggingface

RECIPES = ("oscar", "oscar-v1")
FOLDER = "requests"
_MOST = 200  # open pull requests to look through for the same one


@dataclass(frozen=True)
class Asked:
    """A pull request that asks for a model."""

    url: str
    is_new: bool
    """False if somebody has asked for the same model already."""


def recipe_file(model: str, recipe: str) -> tuple[str, bytes]:
    """Path and content of the recipe file that asks for a model. Raises `UsageError`."""
    model = check_model(model)
    if recipe not in RECIPES:
        raise UsageError("that recipe is not offered", hint=f"choose one of {', '.join(RECIPES)}")
    # Quoted, because a name of digits alone would be no text in YAML.
    text = f'# Asked for by a visitor of the Space.\nmodel: "{model}"\nextends: {recipe}\n'
    return f"{FOLDER}/{model.replace('/', '__')}.yaml", text.encode()


def ask_for(model: str, recipe: str, zoo: str, token: str) -> Asked:
    """Open a pull request to a zoo with the recipe file, unless one is open for the same model.

    `token` is the visitor's own. Raises `HubError`.
    """
    api = HfApi(token=token, library_name="rotationzoo-space")
    try:
        with asking_huggingface():
            # As the hub spells it: it takes a name in any case, and after a model was renamed also
            # the old one, and `regenerate` would not know either.
            model = str(api.model_info(model).id)
            path, content = recipe_file(model, recipe)
            title = f"Asks for rotations of {model}"
            if api.file_exists(zoo, path):
                return Asked(f"{api.endpoint}/{zoo}/blob/main/{path}", is_new=False)
            if url := _find_open(api, zoo, title):
                return Asked(url, is_new=False)
            commit = api.create_commit(
                zoo,
                [CommitOperationAdd(path, content)],
                commit_message=title,
                commit_description=f"Recipe: {recipe}. See `rotationzoo regenerate --plan`.",
                create_pr=True,
            )
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise HubError(
            f"the hub took no pull request to {zoo} (status {status})",
            hint="sign in again, and allow the Space to open pull requests",
        ) from error
    return Asked(_checked(commit.pr_url, api.endpoint), is_new=True)


def _find_open(api: HfApi, zoo: str, title: str) -> str | None:
    pulls = api.get_repo_discussions(zoo, discussion_type="pull_request", discussion_status="open")
    for pull in itertools.islice(pulls, _MOST):
        if pull.title == title:
            return f"{api.endpoint}/{zoo}/discussions/{int(pull.num)}"
    return None


def _checked(url: str | None, endpoint: str) -> str:
    """The address of a pull request, if it is one of the hub."""
    if not re.fullmatch(re.escape(endpoint) + r"/[\w./-]+", url or ""):
        raise HubError("the hub did not say where the pull request is", hint="look at the zoo")
    return str(url)
