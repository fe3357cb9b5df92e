"""`python -m rotationzoo` is `rotationzoo`."""

from rotationzoo.cli import app

app(prog_name="rotationzoo")
