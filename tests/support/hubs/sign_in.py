"""A Hugging Face Hub that people can sign in with: OAuth 2 by authorization code."""

import base64
import secrets
from urllib.parse import parse_qs, urlencode

from support.hubs.calls import Answer, Call, Refusal, as_json
from support.hubs.hub import route
from support.hubs.huggingface import HuggingFaceHub

CLIENT, SECRET = "the-space", "its-secret"


class SignInHub(HuggingFaceHub):
    """Every visitor agrees at once, and gets the token of the hub's one user."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: dict[str, str] = {}  # -> the address that it was sent to
        self.asked_scopes: list[str] = []
        self.credentials: set[str | None] = set()

    def credential(self, call: Call) -> str | None:
        credential = super().credential(call)
        self.credentials.add(credential)
        return credential

    @route("GET", "/oauth/authorize", access="open")
    def authorize(self, call: Call) -> Answer:
        if call.option("client_id") != CLIENT or call.option("response_type") != "code":
            raise Refusal(400, "No such application")
        self.asked_scopes.append(call.option("scope"))
        code, address = secrets.token_hex(8), call.option("redirect_uri")
        self.codes[code] = address
        query = urlencode({"code": code, "state": call.option("state")})
        return Answer(302, b"", {"Location": f"{address}?{query}"})

    @route("POST", "/oauth/token", access="open")
    def give_token(self, call: Call) -> Answer:
        form = {name: values[0] for name, values in parse_qs(call.body.decode()).items()}
        expected = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        is_application = call.headers.get("Authorization") == f"Basic {expected}"
        address = self.codes.pop(form.get("code", ""), None)  # a code is good for one token
        if not is_application or address is None or address != form.get("redirect_uri"):
            raise Refusal(401, "No such code")
        return as_json({"access_token": self.token, "token_type": "bearer", "expires_in": 28800})
