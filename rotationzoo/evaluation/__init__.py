"""Evaluation: what each rotation costs a model whose KV cache is stored in 2 bits."""
