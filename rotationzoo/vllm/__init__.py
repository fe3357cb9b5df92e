"""The attention backend that a released vLLM loads from this package: it stores keys and values in
2 bits, in pages of vLLM's own block manager."""

from rotationzoo.sides import HEADS, LATENTS

KEY = "rotationzoo"
"""The key of vLLM's `additional_config` that names the artifact, and the name of the plugin."""
BACKENDS = "rotationzoo.vllm.backend"
WORKER = f"{BACKENDS}.RotatedWorker"
CPU_BACKENDS = {
    HEADS: (f"{BACKENDS}_cpu.RotatedCpuBackend", "CPU_ATTN"),
    LATENTS: (f"{BACKENDS}_latents.LatentBackend", "AMX_MLA", "CPU_MLA"),
}
"""Our backends for what a layer caches, and those of vLLM's for CPUs whose places they take."""
GPU_HEADS, GPU_LATENTS = f"{BACKENDS}.RotatedBackend", f"{BACKENDS}_latents.LatentGpuBackend"
CONNECTORS = "rotationzoo.vllm.connectors"
SERVE = "start it with: rotationzoo serve MODEL --rotations ROTATIONS"
FOLDER = "ROTATIONZOO_METRICS"
"""The variable that names the folder of `metrics`, or nothing in a process that answers nobody."""
