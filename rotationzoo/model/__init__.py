"""One causal language model: where it is, how it is loaded, and what its attention is handed."""
