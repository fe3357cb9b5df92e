"""Text that a model writes through a cache of 2 bits: `rotationzoo generate`."""
