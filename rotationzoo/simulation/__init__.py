"""A simulated 2-bit KV cache: which tokens stay exact, what it costs, and a model that reads from
it."""
