"""The command line: `rotationzoo.cli.app:app`."""

from rotationzoo.cli import engines, model, zoo  # noqa: F401 (importing registers their commands)
from rotationzoo.cli.options import app

__all__ = ["app"]
