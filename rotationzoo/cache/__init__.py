"""A 2-bit key/value cache: what it keeps exact, what it costs, and a model that reads one."""
