"""The mathematics without models or files: Hadamard matrices, second moments, compositions, paired
tests."""
