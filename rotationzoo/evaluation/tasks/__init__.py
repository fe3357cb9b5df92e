"""Recall tasks inside an evaluation: what the model answers exactly, and through each arm's cache.

`settings` holds what the user chose, `prompts` writes the questions, `answering` asks them,
`scores` computes the figures, and `verdict` compares the arms.
"""
