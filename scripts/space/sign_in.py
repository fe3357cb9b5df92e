"""Signing in with Hugging Face (OAuth 2, authorization code), and the sessions of visitors.

A visitor's token stays in this process: the browser has only the random name of a session. The
cookies are `SameSite=Lax`, so that no other site can send a form in a visitor's name. Nothing is
kept of visitors who are still on the way to the hub, so that nobody can crowd out the others.
"""

import hmac
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from urllib.parse import urlencode

from settings import Settings
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.network import tokens
from rotationzoo.network.huggingface_session import asking_huggingface

COOKIE = "session"
CALLBACK = "/signed-in"
_STATE = "state"  # the cookie of a visitor who is on the way to the hub
_ON_THE_WAY = 600  # seconds
_LONGEST = 8 * 3600  # seconds; so long is a token valid unless the Space's README says otherwise
_MOST = 1000  # sessions; the oldest is forgotten first


@dataclass(frozen=True)
class Session:
    """A visitor who has signed in."""

    token: str
    name: str
    ends: float
    """The `time.monotonic()` at which the token expires."""


class Sessions:
    """The sessions of this process, by the random name in the visitor's cookie."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, request: Request) -> Session | None:
        """The session of a request's visitor; None if nobody has signed in, or too long ago."""
        session = self._sessions.get(request.cookies.get(COOKIE, ""))
        return session if session and session.ends > time.monotonic() else None

    def start(self) -> Response:
        """Send a visitor to the hub. Raises `RotationZooError` where nobody can sign in."""
        if self.settings.oauth is None:
            raise RotationZooError("nobody can sign in here: this Space has no OAuth application")
        state = secrets.token_urlsafe(32)
        query = {
            "client_id": self.settings.oauth.client_id,
            "redirect_uri": self.settings.address + CALLBACK,
            "response_type": "code",
            "scope": self.settings.oauth.scopes,
            "state": state,
        }
        url = f"{self.settings.oauth.provider}/oauth/authorize?{urlencode(query)}"
        response = RedirectResponse(url, 302)
        self._set_cookie(response, _STATE, state, _ON_THE_WAY)
        return response

    def finish(self, request: Request) -> Response:
        """Take the code that the hub sent a visitor back with, and change it for a token.

        Raises `RotationZooError` for an answer to another visitor's question.
        """
        expected = request.cookies.get(_STATE, "")
        state = request.query_params.get("state", "")
        if not expected or not hmac.compare_digest(expected.encode(), state.encode()):
            raise RotationZooError("that is no answer to you", hint="sign in again")
        token = self._fetch_token(request.query_params.get("code", ""))
        session = Session(token, _name_of(token), time.monotonic() + _LONGEST)
        # Under a new name: whoever knew the old one is not signed in.
        self._forget(request)
        name = secrets.token_urlsafe(32)
        with self._lock:
            self._sessions[name] = session
            self._drop_oldest()
        response = RedirectResponse("/", 303)
        response.delete_cookie(_STATE)
        self._set_cookie(response, COOKIE, name, _LONGEST)
        return response

    def end(self, request: Request) -> Response:
        """Sign a visitor out."""
        self._forget(request)
        response = RedirectResponse("/", 303)
        response.delete_cookie(COOKIE)
        return response

    def _set_cookie(self, response: Response, name: str, value: str, seconds: int) -> None:
        secure = self.settings.address.startswith("https:")
        response.set_cookie(name, value, seconds, secure=secure, httponly=True, samesite="lax")

    def _forget(self, request: Request) -> None:
        with self._lock:
            session = self._sessions.pop(request.cookies.get(COOKIE, ""), None)
        if session is not None:
            tokens.forget(session.token)

    def _drop_oldest(self) -> None:
        """Forget the sessions that have ended, and the oldest if there are too many."""
        now = time.monotonic()
        for name, session in list(self._sessions.items()):
            if session.ends > now and len(self._sessions) <= _MOST:
                return
            del self._sessions[name]
            tokens.forget(session.token)

    def _fetch_token(self, code: str) -> str:
        import huggingface_hub

        oauth = self.settings.oauth
        if oauth is None or not code:
            raise RotationZooError("the hub has not signed you in", hint="sign in again")
        form = {
            "client_id": oauth.client_id,
            "code": code,
            "grant_type": "authorization_code",
            "redirect_uri": self.settings.address + CALLBACK,
        }
        with asking_huggingface(oauth.provider):
            answer = huggingface_hub.get_session().post(
                f"{oauth.provider}/oauth/token",
                data=form,
                auth=(oauth.client_id, oauth.client_secret),
            )
        token = answer.json().get("access_token") if answer.status_code == 200 else None
        if not isinstance(token, str) or not tokens.check_token(token, "the answer of the hub"):
            raise HubError("the hub has not signed you in", hint="sign in again")
        return token


def _name_of(token: str) -> str:
    from huggingface_hub import HfApi

    with asking_huggingface():
        return str(HfApi(token=token).whoami()["name"])
