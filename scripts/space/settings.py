"""What the Space is told by its environment, and what it hides from everything that it starts."""

import os
from dataclasses import dataclass

from rotationzoo.network.tokens import HUGGINGFACE_VARIABLES, MODELSCOPE_VARIABLE
from rotationzoo.zoo.lookup import ZOO


@dataclass(frozen=True)
class OAuth:
    """The application that Hugging Face made for this Space (`hf_oauth` in README.md)."""

    client_id: str
    client_secret: str
    scopes: str
    provider: str


@dataclass(frozen=True)
class Settings:
    """Where the Space runs, and whose zoo it shows."""

    zoo: str
    """The repository whose index is listed, and which pull requests go to."""
    address: str
    """The Space's own address, without a slash at the end."""
    host: str
    port: int
    oauth: OAuth | None
    """None where nobody can sign in: `hf_oauth` is off, or the Space runs on one's own machine."""


def read_settings() -> Settings:
    """The settings, from the variables of a Space on Hugging Face."""
    port = int(os.environ.get("PORT", "7860"))
    host = os.environ.get("SPACE_HOST")
    names = ("OAUTH_CLIENT_ID", "OAUTH_CLIENT_SECRET", "OAUTH_SCOPES", "OPENID_PROVIDER_URL")
    values = [os.environ.get(name, "") for name in names]
    return Settings(
        zoo=os.environ.get("ZOO_REPO", ZOO),
        address=f"https://{host}" if host else f"http://127.0.0.1:{port}",
        host="0.0.0.0" if host else "127.0.0.1",
        port=port,
        oauth=OAuth(*values) if all(values) else None,
    )


def forget_tokens() -> None:
    """Give up every token of the Space's owner: what visitors do is done with their own, or with
    none. Must run before huggingface_hub is imported, which reads its variables once."""
    for name in (*HUGGINGFACE_VARIABLES, MODELSCOPE_VARIABLE):
        os.environ.pop(name, None)
    os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
