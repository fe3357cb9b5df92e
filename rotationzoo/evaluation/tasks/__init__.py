"""Recall tasks inside an evaluation: what the model answers exactly, and through each arm's cache.

`prompts` writes the questions that the user chose, `answering` asks them, and `scores` computes the
figures.
"""
