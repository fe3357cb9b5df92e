"""Capacity planning: what a model's weights and cache take in each format, and what fits a GPU."""
