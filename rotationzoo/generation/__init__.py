"""Writing text with a model whose cache stores 2 bits, and comparing it with the exact model's."""
