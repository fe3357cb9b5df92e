"""Simulates a quantized KV cache, ours or another engine's, within a model's forward pass."""
