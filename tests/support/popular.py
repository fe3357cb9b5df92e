"""The configs of popular models, as far as they decide what weights and caches take, and how many
parameters the models have."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from rotationzoo.capacity.shape import Shape, read_shape
from rotationzoo.model.source import Source


def _config(kind: str, layers: int, hidden: int, width: int, heads: tuple[int, int], **more):
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": width, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


_LLAMA = dict(vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False)
_QWEN2 = dict(
    vocab_size=152064, max_position_embeddings=32768, tie_word_embeddings=False,
    use_sliding_window=False, sliding_window=131072, max_window_layers=28,
)  # fmt: skip
_QWEN3 = dict(
    vocab_size=151936, max_position_embeddings=40960, head_dim=128, use_sliding_window=False,
    sliding_window=None, tie_word_embeddings=False,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _config("llama", 32, 4096, 14336, (32, 8), **_LLAMA),
    "Llama-3.3-70B": _config("llama", 80, 8192, 28672, (64, 8), **_LLAMA),
    "Qwen2.5-7B": _config("qwen2", 28, 3584, 18944, (28, 4), **_QWEN2),
    "Qwen3-4B": _config(
        "qwen3", 36, 2560, 9728, (32, 8), **{**_QWEN3, "tie_word_embeddings": True}
    ),
    "Qwen3-8B": _config("qwen3", 36, 4096, 12288, (32, 8), **_QWEN3),
    "Qwen3-30B-A3B": _config(
        "qwen3_moe", 48, 2048, 6144, (32, 4), num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[], **_QWEN3,
    ),
    "gemma-2-9b": _config(
        "gemma2", 42, 3584, 14336, (16, 8), head_dim=256, vocab_size=256000,
        max_position_embeddings=8192, sliding_window=4096,
    ),
    "gpt-oss-20b": _config(
        "gpt_oss", 24, 2880, 2880, (64, 8), head_dim=64, vocab_size=201088,
        max_position_embeddings=131072, sliding_window=128, num_local_experts=32,
        num_experts_per_tok=4, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"] * 12,
        quantization_config={"quant_method": "mxfp4"},
    ),
    "DeepSeek-V3": _config(
        "deepseek_v3", 61, 7168, 18432, (128, 128), vocab_size=129280, kv_lora_rank=512,
        q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
        first_k_dense_replace=3, max_position_embeddings=163840, tie_word_embeddings=False,
        quantization_config={"quant_method": "fp8"},
    ),
}  # fmt: skip

PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "gemma-2-9b": 9_241_705_984,
    "gpt-oss-20b": 20_914_757_184,
    # Without the layer that predicts a second token, which the hub counts, too.
    "DeepSeek-V3": 671_026_404_352,
}


def shape_of(name: str) -> Shape:
    """The shape of a model, built without weights."""
    return _read_config(json.dumps(CONFIGS[name]))


def remember_shape(source: Source) -> Shape:
    """What `read_shape` returns. A model of some dozen layers takes it a second, the first time."""
    return _read_config((source.folder / "config.json").read_text())


@functools.cache
def _read_config(config: str) -> Shape:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return read_shape(Source("model", Path(folder), None))
