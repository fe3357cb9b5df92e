"""Checks of an artifact: its soundness, its model, and the CUDA kernel that stores its rows.

`verify` checks that it is intact and sound, `membership` that it belongs to a model's weights, and
`kernel` that the CUDA kernel stores rows as the codec defines.
"""
