"""Tiny vision and omni models with processors, built in code, and data files for them."""

import wave
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from rotationzoo.model.source import DEMO
from support.architectures import BASE, MOSTLY_SLIDING, MROPE, WINDOW
from support.models import randomize, write_jsonl

needs_pillow = pytest.mark.skipif(
    not find_spec("PIL"), reason="the extra media is not installed: pip install pillow"
)

MARKS = dict(
    boi_token="<image>", image_token="<pixel>", eoi_token="</image>",
    boa_token="<audio>", audio_token="<wave>", eoa_token="</audio>",
    vision_start_token="<|vision_start|>", vision_end_token="<|vision_end|>", video_token="<film>",
)  # fmt: skip
VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
AUDIO = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=64,
    subsampling_conv_channels=[128, 8],
)  # fmt: skip


def template(image: str) -> str:
    """A chat template that writes the parts of all messages, and nothing else."""
    return (
        "{% for message in messages %}{% for part in message.content %}"
        "{% if part.type == 'image' %}" + image + "{% elif part.type == 'audio' %}<wave>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )


def tokenizer() -> Any:
    """The demo's tokenizer with tokens for images and audio."""
    return transformers.AutoTokenizer.from_pretrained(
        DEMO, extra_special_tokens=MARKS, pad_token="<|end|>"
    )


def text_config(**options: Any) -> dict[str, Any]:
    """A text config with room for the tokens of `tokenizer`."""
    return {**BASE, "vocab_size": 2064, "max_position_embeddings": 512, "head_dim": 16, **options}


def _without_videos(kind: type, *parts: Any, **options: Any) -> Any:
    """A processor that has no processor of videos, and so needs no torchvision."""
    mixin = transformers.ProcessorMixin
    with mock.patch.object(mixin, "check_argument_for_proper_class", return_value=None):
        return kind(*parts, None, **options)


def _gemma3() -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        text_config=text_config(sliding_window=WINDOW, layer_types=MOSTLY_SLIDING),
        vision_config=dict(VISION, image_size=28, patch_size=14),
        mm_tokens_per_image=4, image_token_id=2049, boi_token_id=2048, eoi_token_id=2050,
    )  # fmt: skip
    pixels = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = transformers.Gemma3Processor(
        pixels, tokenizer(), chat_template=template("<image>"), image_seq_length=4
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


def _qwen(name: str, **vision: Any) -> tuple[Any, Any]:
    sizes = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
    config = getattr(transformers, f"{name}Config")(
        text_config=text_config(rope_parameters=MROPE),
        vision_config=dict(sizes, patch_size=14, **vision),
        image_token_id=2049, video_token_id=2056,
        vision_start_token_id=2054, vision_end_token_id=2055,
    )  # fmt: skip
    pixels = transformers.Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 84 * 84}
    )
    marks = template("<|vision_start|><pixel><|vision_end|>")
    kind = getattr(transformers, f"{name}Processor")
    processor = _without_videos(kind, pixels, tokenizer(), chat_template=marks)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def _gemma4() -> tuple[Any, Any]:
    config = transformers.Gemma4Config(
        text_config=text_config(
            global_head_dim=32, sliding_window=WINDOW, num_kv_shared_layers=2,
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=2064,
            layer_types=["sliding_attention", "full_attention"] * 2,
            use_bidirectional_attention="vision",
        ),
        vision_config=dict(
            VISION, head_dim=16, num_key_value_heads=2, patch_size=4, pooling_kernel_size=2
        ),
        audio_config=AUDIO, image_token_id=2049, audio_token_id=2052, video_token_id=2056,
        boi_token_id=2048, eoi_token_id=2050, boa_token_id=2051, eoa_token_index=2053,
    )  # fmt: skip
    pixels = transformers.Gemma4ImageProcessorPil(
        patch_size=4, max_soft_tokens=70, pooling_kernel_size=2
    )
    sounds = transformers.Gemma4AudioFeatureExtractor()
    processor = _without_videos(
        transformers.Gemma4Processor, sounds, pixels, tokenizer(), chat_template=template("<pixel>")
    )
    return transformers.Gemma4ForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gemma3": _gemma3,
    "qwen3_vl": lambda: _qwen("Qwen3VL", deepstack_visual_indexes=[0]),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL", window_size=28, fullatt_block_indexes=[0]),
    "gemma4": _gemma4,
}


def build(name: str) -> tuple[Any, Any]:
    """A random model of one family in float64 (Gemma 4, whose audio tower has no float64, in
    float32), and its processor."""
    torch.manual_seed(0)
    try:
        model, processor = FAMILIES[name]()
    except ModuleNotFoundError:
        pytest.skip(f"the processor of {name} needs torchvision in this transformers")
    randomize(model, 0.2)
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_weight = tensor.is_floating_point() and "inv_freq" not in tensor_name
        if is_weight and name != "gemma4":
            tensor.data = tensor.data.double()
    return model.eval(), processor


def write_rows(folder: Path, rows: int = 4, audio: bool = False) -> Path:
    """A `.jsonl` file of captions with one image each, of different sizes, and perhaps audio."""
    from PIL import Image

    generator = np.random.default_rng(0)
    lines = []
    for row in range(rows):
        pixels = generator.integers(0, 255, (40 + 20 * row, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")
        text = f"What number {row} shows: " + "some words about it, and more of them. " * 6
        line = {"text": text, "image": f"{row}.png"}
        if audio:
            write_wave(folder / f"{row}.wav", generator.integers(-9999, 9999, 4000 + 800 * row))
            line["sound"] = f"{row}.wav"
        lines.append(line)
    return write_jsonl(folder / "rows.jsonl", lines)


def write_wave(path: Path, samples: np.ndarray, rate: int = 8000) -> None:
    """A WAV file of 16 bits and one channel."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, len(samples), "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
