"""rotationzoo: orthogonal rotations for 2-bit key/value caches, from any causal language model."""

__version__ = "0.1.0"
