"""The cache that really stores 2 bits, and text that a model writes through it."""
