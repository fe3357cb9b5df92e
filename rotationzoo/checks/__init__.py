"""Checks of an artifact: its soundness, its model, and the CUDA kernel that stores its rows."""
