"""The attention backend that a released vLLM loads from this package: it stores keys and values in
2 bits, in pages of vLLM's own block manager."""
