"""`python -m rotationzoo` is `rotationzoo`."""

from rotationzoo.cli.app import main

main()
