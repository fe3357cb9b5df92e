"""One causal language model: finding it, loading it, and reading what goes into its attention."""
