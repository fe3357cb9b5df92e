"""The pages of the Space: plans, the zoo with its answers, and requests for rotations."""

import asyncio
import logging
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from connections import SECONDS, Guard
from planning import CONTEXTS, GPUS, USUAL, check_model, make_plan
from regeneration import RECIPES, Asked, ask_for
from settings import Settings
from sign_in import CALLBACK, Sessions
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from zoo_entries import Zoo
from zoo_table import table_values

from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.report.page import render_page

TEMPLATES = Path(__file__).parent / "templates"
SORTING = Path(__file__).with_name("zoo.js")
_LARGEST_FORM = 4096  # bytes


class Pages:
    """Answers the requests of the Space's visitors."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.sessions = Sessions(settings)
        self.zoo = Zoo(settings.zoo)

    def home(self, request: Request) -> Response:
        """The form for a plan, and the zoo."""
        entries = self.zoo.entries()
        values = {**table_values(entries.rows()), "origin": entries.loaded.origin}
        return self._show(request, "home.html.jinja", scripts=(SORTING,), **values)

    def plan(self, request: Request) -> Response:
        """The plan for the model, the GPU and the context that a visitor chose."""
        query = request.query_params
        offered = {str(context): context for context in CONTEXTS}
        context = offered.get(query.get("context", str(USUAL["context"])), 0)
        plan = make_plan(query.get("model", ""), query.get("gpu", USUAL["gpu"]), context)
        listed = self.zoo.entries().of_model(plan["model"])
        return self._show(request, "plan.html.jinja", plan=plan, listed=listed)

    def answers(self, request: Request) -> Response:
        """What one entry keeps and costs."""
        entries = self.zoo.entries()
        entry = entries.entry(request.path_params["identity"])
        verdict, arms = entries.answers(entry)
        values = {"entry": entry, "verdict": verdict, "arms": arms}
        return self._show(request, "answers.html.jinja", **values)

    async def ask(self, request: Request) -> Response:
        """A pull request for the model in the form, in the name of the visitor."""
        _check_sender(request, self.settings.address)
        form = await _read_form(request)
        asked = await run_in_threadpool(self._ask, request, form)
        return self._show(request, "asked.html.jinja", asked=asked)

    def _ask(self, request: Request, form: dict[str, str]) -> Asked:
        session = self.sessions.find(request)
        if session is None:
            raise UsageError("a request is made in your name", hint="sign in first")
        model = check_model(form.get("model", ""))
        # So that nobody asks for a model that does not exist or can have no rotations.
        plan = make_plan(model, **USUAL)
        if plan["refusal"]:
            raise RotationZooError(f"{model} can have no rotations: {plan['refusal']}")
        return ask_for(model, form.get("recipe", ""), self.settings.zoo, session.token)

    def sign_in(self, request: Request) -> Response:
        """To the hub, which sends the visitor back."""
        return self.sessions.start()

    def signed_in(self, request: Request) -> Response:
        """Back from the hub."""
        return self.sessions.finish(request)

    def sign_out(self, request: Request) -> Response:
        """Forget the visitor's token."""
        _check_sender(request, self.settings.address)
        return self.sessions.end(request)

    def error(self, request: Request, error: Exception) -> Response:
        """What went wrong, in one sentence; never a traceback or the path of a file."""
        sentence, hint, status = "something went wrong here, or at the hub", "try again later", 502
        if isinstance(error, HTTPException):
            sentence, hint, status = "there is no such page", "begin at the first one", 404
            if error.status_code == 405:
                sentence, status = "this page is not asked for in that way", 405
        elif isinstance(error, RotationZooError):
            sentence, hint, status = str(error), error.hint, 400
        else:
            logging.getLogger("space").error("%s", type(error).__name__)
        return self._show(request, "error.html.jinja", status=status, sentence=sentence, hint=hint)

    def _show(
        self,
        request: Request,
        template: str,
        scripts: tuple[Path, ...] = (),
        status: int = 200,
        **values: Any,
    ) -> Response:
        session = self.sessions.find(request)
        html = render_page(
            template,
            scripts,
            folders=(TEMPLATES,),
            form_action="'self'",
            user=session.name if session else None,
            can_sign_in=self.settings.oauth is not None,
            zoo=self.settings.zoo,
            gpus=GPUS,
            contexts=CONTEXTS,
            usual={"model": "", **USUAL},
            recipes=RECIPES,
            **values,
        )
        return HTMLResponse(html, status)


def _check_sender(request: Request, address: str) -> None:
    """Raise `UsageError` for a form of another site. The cookies alone let those of other hosts of
    the same domain through. Older browsers name only the origin; whoever names neither may be
    anybody's."""
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site != "same-origin" and (site is not None or origin != address):
        raise UsageError("that form was sent by another site", hint="send it from this page")


async def _read_form(request: Request) -> dict[str, str]:
    """The fields of a small form."""
    body = b""
    try:
        async with asyncio.timeout(SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _LARGEST_FORM:
                    raise UsageError("that form is too large")
    except TimeoutError as error:
        raise UsageError("that form did not arrive", hint="send it again") from error
    fields = parse_qs(body.decode("ascii", "replace"))
    return {name: values[0] for name, values in fields.items()}


def make_app(settings: Settings) -> Guard:
    """The web application."""
    pages = Pages(settings)
    routes = [
        Route("/", pages.home),
        Route("/plan", pages.plan),
        Route("/answers/{identity}", pages.answers),
        Route("/ask", pages.ask, methods=["POST"]),
        Route("/sign-in", pages.sign_in),
        Route(CALLBACK, pages.signed_in),
        Route("/sign-out", pages.sign_out, methods=["POST"]),
    ]
    handlers = dict.fromkeys((RotationZooError, HTTPException, Exception), pages.error)
    return Guard(Starlette(routes=routes, exception_handlers=handlers))
