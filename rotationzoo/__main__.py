"""`python -m rotationzoo` is `rotationzoo`."""

from rotationzoo.cli.app import app

app(prog_name="rotationzoo")
