"""Mathematics that needs no models or files: Hadamard matrices, second moments, compositions,
paired tests."""
