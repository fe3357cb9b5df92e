"""The 2-bit codec: formats, clip rules, the definition in plain torch, and the CUDA kernels."""
