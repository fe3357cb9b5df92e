"""Recall tasks inside an evaluation: what a model answers exactly, and through each arm's cache."""
