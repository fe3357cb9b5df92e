"""Mathematics without models or files: Hadamard matrices, moments, compositions, paired tests."""
