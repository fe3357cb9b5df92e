"""Thirty attention families as tiny random models, built in code: what the capture is held
against.

Dimensions are as small as each family allows. `EXPECTED` says what calibration makes of each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

LAYERS = 4
WINDOW = 8
BASE = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ROUTED = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1
)
ROUTED |= dict(first_k_dense_replace=1)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
LATENT = dict(
    q_lora_rank=32, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    num_key_value_heads=4, **ROUTED
)  # fmt: skip
INDEXER = dict(LATENT, index_topk=4, index_n_heads=2, index_head_dim=16)
DELTA = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
MOSTLY_SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
MOSTLY_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
MARKERS = dict(
    image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63
)
MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])

# name -> (model class without its ending, config class without its ending, options)
_CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "Llama", {}),
    "qwen3": ("Qwen3", "Qwen3", dict(head_dim=16)),
    "phi3": ("Phi3", "Phi3", dict(sliding_window=WINDOW)),
    "mistral": ("Mistral", "Mistral", dict(sliding_window=WINDOW)),
    "gemma2": ("Gemma2", "Gemma2", dict(
        head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=1.0,
        attn_implementation="eager")),
    "gemma3": ("Gemma3", "Gemma3Text", dict(head_dim=16, sliding_window=WINDOW,
        layer_types=MOSTLY_SLIDING)),
    "gemma4": ("Gemma4", "Gemma4Text", dict(
        head_dim=16, global_head_dim=32, sliding_window=WINDOW, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64, layer_types=["sliding_attention", "full_attention"] * 2)),
    "gpt_oss": ("GptOss", "GptOss", dict(head_dim=16, sliding_window=WINDOW,
        layer_types=MOSTLY_SLIDING, **LOCAL)),
    "mimo_v2_flash": ("MiMoV2Flash", "MiMoV2Flash", dict(
        head_dim=16, v_head_dim=12, sliding_window=WINDOW, layer_types=MOSTLY_SLIDING, **ROUTED)),
    "llama4": ("Llama4", "Llama4Text", dict(
        head_dim=16, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=WINDOW)),
    "glm4_moe": ("Glm4Moe", "Glm4Moe", dict(head_dim=16, **ROUTED)),
    "minimax_m2": ("MiniMaxM2", "MiniMaxM2", dict(head_dim=16, **LOCAL)),
    "qwen3_next": ("Qwen3Next", "Qwen3Next", dict(
        head_dim=16, layer_types=MOSTLY_LINEAR, shared_expert_intermediate_size=32,
        decoder_sparse_step=1, **EXPERTS, **DELTA)),
    "qwen3_5": ("Qwen3_5", "Qwen3_5Text", dict(head_dim=16, layer_types=MOSTLY_LINEAR, **DELTA)),
    "minimax": ("MiniMax", "MiniMax", dict(head_dim=16, block_size=8, layer_types=MOSTLY_LINEAR,
        **LOCAL)),
    "lfm2": ("Lfm2", "Lfm2", dict(layer_types=["conv", "conv", "full_attention", "conv"])),
    "kimi_linear": ("KimiLinear", "KimiLinear", dict(
        LATENT, head_dim=16, layer_types=MOSTLY_LINEAR, linear_head_dim=16, linear_num_heads=4)),
    "deepseek_v2": ("DeepseekV2", "DeepseekV2", LATENT),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3", LATENT),
    "glm4_moe_lite": ("Glm4MoeLite", "Glm4MoeLite", LATENT),
    "longcat_flash": ("LongcatFlash", "LongcatFlash", dict(
        LATENT, head_dim=8, num_layers=2, zero_expert_num=2, ffn_hidden_size=64,
        expert_ffn_hidden_size=32)),
    "deepseek_v32": ("DeepseekV32", "DeepseekV32", INDEXER),
    "glm_moe_dsa": ("GlmMoeDsa", "GlmMoeDsa", INDEXER),
    "deepseek_v4": ("DeepseekV4", "DeepseekV4", dict(head_dim=16, sliding_window=WINDOW)),
    "doge": ("Doge", "Doge", {}),
    "falcon": ("Falcon", "Falcon", dict(new_decoder_architecture=True, num_kv_heads=2,
        alibi=False)),
}  # fmt: skip
_WHOLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptj": ("GPTJForCausalLM", "GPTJConfig", dict(
        vocab_size=64, n_embd=64, n_layer=LAYERS, n_head=4, rotary_dim=8, n_positions=64,
        bos_token_id=1, eos_token_id=2)),
    "gemma3-vlm": ("Gemma3ForConditionalGeneration", "Gemma3Config", dict(
        text_config=dict(BASE, head_dim=16, sliding_window=WINDOW, layer_types=MOSTLY_SLIDING),
        mm_tokens_per_image=4,
        vision_config=dict(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            image_size=28, patch_size=14))),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", dict(
        MARKERS, vision_config=dict(VISION, deepstack_visual_indexes=[0]),
        text_config=dict(BASE, head_dim=16, rope_parameters=MROPE))),
    "qwen3_5-vlm": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", dict(
        MARKERS, vision_config=VISION, text_config=dict(BASE, head_dim=16,
        layer_types=MOSTLY_LINEAR, **DELTA))),
}  # fmt: skip
NAMES = [*_CAUSAL, *_WHOLE]


@dataclass(frozen=True)
class Expectation:
    """The layers that get a rotation, or the words that the refusal must contain."""

    layers: tuple[int, ...] = tuple(range(LAYERS))
    refusal: str | None = None


_LATENT_CACHE = Expectation((), "compressed latent")
_OWN_CODE = Expectation((), "its own code")
_LAST = Expectation((3,))
EXPECTED = dict.fromkeys(NAMES, Expectation())
EXPECTED |= dict.fromkeys(["qwen3_next", "qwen3_5", "minimax", "qwen3_5-vlm"], _LAST)
EXPECTED |= {"lfm2": Expectation((2,)), "gemma4": Expectation((0, 1))}
EXPECTED |= {"kimi_linear": _LAST, "deepseek_v4": _LATENT_CACHE, "falcon": _OWN_CODE}
SPARSE = ["deepseek_v32", "glm_moe_dsa"]
"""Families whose cache also keeps what an indexer reads."""
CACHES_HEADS = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18)
"""Whether transformers caches what sparse attention reads, and not the latent."""
if CACHES_HEADS:
    EXPECTED |= dict.fromkeys(SPARSE, _LATENT_CACHE)
IS_OLD = Version(transformers.__version__) < Version("5.24")
if IS_OLD:
    EXPECTED["gptj"] = _OWN_CODE
# One for each way through the code: plain, with norms of queries and keys, with soft caps and
# windows, with sinks and experts, with linear attention between, and with latents.
REPRESENTATIVE = {"llama", "qwen3", "gemma2", "gpt_oss", "qwen3_5", "deepseek_v3"}
CALIBRATED = [name for name in NAMES if not EXPECTED[name].refusal]
LATENTS = ["kimi_linear", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", *SPARSE]
LATENTS = [name for name in LATENTS if name in CALIBRATED]
"""Families that cache latents."""
HEADS = [name for name in CALIBRATED if name not in LATENTS]
"""Families that cache keys and values of heads."""


def config(name: str, **changes: Any) -> transformers.PretrainedConfig:
    """The tiny config of one family, with some of its options changed."""
    if name in _CAUSAL:
        _, kind, options = _CAUSAL[name]
        return getattr(transformers, f"{kind}Config")(**{**BASE, **options, **changes})
    _, kind, options = _WHOLE[name]
    return getattr(transformers, kind)(**{**options, **changes})


def available(name: str) -> bool:
    """Whether the installed transformers has this family."""
    model = f"{_CAUSAL[name][0]}ForCausalLM" if name in _CAUSAL else _WHOLE[name][0]
    return hasattr(transformers, model)


def families(names: Iterable[str] = NAMES) -> pytest.MarkDecorator:
    """Parametrizes a test with the `name` of each family, and skips those that the installed
    transformers lacks. All but the representative ones are thorough."""
    each = []
    for name in names:
        marks = [] if name in REPRESENTATIVE else [pytest.mark.thorough]
        if not available(name):
            marks.append(pytest.mark.skip(reason="not in this transformers"))
        each.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", each)


def build(
    name: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> transformers.PreTrainedModel:
    """A random model of one family. Weights are wide enough that attention is far from uniform."""
    model_class = f"{_CAUSAL[name][0]}ForCausalLM" if name in _CAUSAL else _WHOLE[name][0]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config(name, **changes)).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or "sink" in parameter_name:
                parameter.normal_(std=0.25 if parameter.ndim >= 2 else 1.0)
    if dtype == torch.float32:
        return model
    model.set_experts_implementation("eager")  # the other one has no float64
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in tensor_name:  # multiplied by positions in float32
            tensor.data = tensor.data.to(dtype if tensor.is_floating_point() else tensor.dtype)
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # of MiniMax, which must agree with each other
            names = "query_decay", "key_decay", "diagonal_decay"
            for name, decay in zip(names, module.decay_factors(module.slope_rate), strict=True):
                setattr(module, name, torch.nn.Buffer(decay))
    return model
