"""Signing in with Hugging Face (OAuth 2, authorization code), and the sessions of visitors.

A visitor's token stays in this process: the browser has only the random name of a session. The
cookie is `SameSite=Lax`, so that no other site can send a form in a visitor's name.
"""

import hmac
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from urllib.parse import urlencode

from settings import Settings
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from rotationzoo.errors import HubError, RotationZooError
from rotationzoo.network.huggingface_session import asking_huggingface
from rotationzoo.network.tokens import check_token

COOKIE = "session"
CALLBACK = "/signed-in"
_LONGEST = 8 * 3600  # seconds; so long is a token valid unless the Space's README says otherwise
_MOST = 1000  # sessions; the oldest is forgotten first


@dataclass
class Session:
    """One visitor: first on the way to the hub with a `state`, then signed in with a token."""

    state: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    ends: float = field(default_factory=lambda: time.monotonic() + _LONGEST)
    token: str | None = None
    name: str = ""


class Sessions:
    """The sessions of this process, by the random name in the visitor's cookie."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def find(self, request: Request) -> Session | None:
        """The session of a request's visitor, on the way or signed in; None if there is none."""
        session = self._sessions.get(request.cookies.get(COOKIE, ""))
        return session if session and session.ends > time.monotonic() else None

    def signed_in(self, request: Request) -> Session | None:
        """The session of a visitor who has signed in."""
        session = self.find(request)
        return session if session and session.token else None

    def start(self) -> Response:
        """Send a visitor to the hub. Raises `RotationZooError` where nobody can sign in."""
        if self.settings.oauth is None:
            raise RotationZooError("nobody can sign in here: this Space has no OAuth application")
        session = Session()
        query = {
            "client_id": self.settings.oauth.client_id,
            "redirect_uri": self.settings.address + CALLBACK,
            "response_type": "code",
            "scope": self.settings.oauth.scopes,
            "state": session.state,
        }
        url = f"{self.settings.oauth.provider}/oauth/authorize?{urlencode(query)}"
        return self._remember(session, RedirectResponse(url, 302))

    def finish(self, request: Request) -> Response:
        """Take the code that the hub sent a visitor back with, and change it for a token.

        Raises `RotationZooError` for an answer to another visitor's question.
        """
        waiting = self.find(request)
        state = request.query_params.get("state", "")
        if waiting is None or not hmac.compare_digest(waiting.state.encode(), state.encode()):
            raise RotationZooError("that is no answer to you", hint="sign in again")
        session = Session(token=self._fetch_token(request.query_params.get("code", "")))
        session.name = _name_of(session.token or "")
        # Under a new name: whoever knew the old one is not signed in.
        self._sessions.pop(request.cookies[COOKIE], None)
        return self._remember(session, RedirectResponse("/", 303))

    def end(self, request: Request) -> Response:
        """Sign a visitor out."""
        self._sessions.pop(request.cookies.get(COOKIE, ""), None)
        response = RedirectResponse("/", 303)
        response.delete_cookie(COOKIE)
        return response

    def _remember(self, session: Session, response: Response) -> Response:
        name = secrets.token_urlsafe(32)
        self._sessions[name] = session
        while len(self._sessions) > _MOST:
            self._sessions.popitem(last=False)
        secure = self.settings.address.startswith("https:")
        response.set_cookie(COOKIE, name, _LONGEST, secure=secure, httponly=True, samesite="lax")
        return response

    def _fetch_token(self, code: str) -> str:
        import huggingface_hub

        oauth = self.settings.oauth
        if oauth is None or not code:
            raise RotationZooError("the hub has not signed you in", hint="sign in again")
        form = {"grant_type": "authorization_code", "code": code}
        form["redirect_uri"] = self.settings.address + CALLBACK
        with asking_huggingface(oauth.provider):
            answer = huggingface_hub.get_session().post(
                f"{oauth.provider}/oauth/token",
                data=form,
                auth=(oauth.client_id, oauth.client_secret),
            )
        token = answer.json().get("access_token") if answer.status_code == 200 else None
        if not isinstance(token, str) or not check_token(token, "the answer of the hub"):
            raise HubError("the hub has not signed you in", hint="sign in again")
        return token


def _name_of(token: str) -> str:
    from huggingface_hub import HfApi

    with asking_huggingface():
        return str(HfApi(token=token).whoami()["name"])
