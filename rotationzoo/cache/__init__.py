"""The cache of transformers that really stores 2 bits."""
