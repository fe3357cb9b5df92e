"""The command line: `rotationzoo.cli:app`."""

from rotationzoo import cli_engines, cli_model, cli_zoo  # noqa: F401 (importing registers their commands)
from rotationzoo.cli_options import app

__all__ = ["app"]
