"""The attention backend that a released vLLM loads from this package: it stores keys and values in
2 bits, in pages of vLLM's own block manager."""

from rotationzoo.sides import HEADS, LATENTS

KEY = "rotationzoo"  # of our options in vLLM's `additional_config`; the plugin has the same name
BACKENDS = "rotationzoo.vllm.backend"
WORKER = f"{BACKENDS}.RotatedWorker"
CPU_BACKENDS = {
    HEADS: (f"{BACKENDS}_cpu.RotatedCpuBackend", "CPU_ATTN"),
    LATENTS: (f"{BACKENDS}_latents.LatentBackend", "AMX_MLA", "CPU_MLA"),
}  # what a layer caches -> our backend, and those of vLLM that it replaces
GPU_HEADS, GPU_LATENTS = f"{BACKENDS}.RotatedBackend", f"{BACKENDS}_latents.LatentGpuBackend"
CONNECTORS = "rotationzoo.vllm.connectors"
SERVE = "start it with: rotationzoo serve MODEL --rotations ROTATIONS"
FOLDER = "ROTATIONZOO_METRICS"  # the folder of `metrics`; empty in a process without requests
