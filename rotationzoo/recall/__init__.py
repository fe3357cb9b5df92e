"""Recall tasks: prompts that ask a model about its own context, and how well it answers them."""
