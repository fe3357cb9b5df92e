"""What llama.cpp's quantized KV caches cost a model, read by a real llama.cpp, beside torch.

    pip install gguf llama-cpp-python
    python scripts/check_llama_cpp.py MODEL... [--caches f16,q8_0,q4_0] [--tasks needles]
        [--prompts 4] [--texts 4] [--length 1024] [--data FILE]

Each MODEL (a folder of a Qwen2 or Qwen3) is converted to a GGUF file with float32 weights and no
vocabulary, because token ids are passed in. Give the published and the folded weights to see what
folding alone gives. For each cache this prints the loss of plain text in nats per token and the
answers to recall tasks, and the same of the simulation in `engine_caches`, on the same ids. `f16`
must agree with torch.

llama.cpp multiplies queries, keys and values with Hadamard matrices before it quantizes them.
`q4_0-unrotated` sets LLAMA_ATTN_ROT_DISABLE, which switches that off.
"""

import argparse
import ctypes
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from cache_readers import answers_of, losses_of
from engine_caches import ENGINE_CACHES, EngineArm
from loading import load
from transformers import PreTrainedModel

from rotationzoo.model import loading
from rotationzoo.model.source import find
from rotationzoo.recall.prompts import Prompt, PromptSettings, write_prompts
from rotationzoo.recipe import Data
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation
from rotationzoo.text.documents import HELD_OUT

ARCHITECTURES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}
"""Cache types by their numbers in `ggml_type`."""
UNROTATED = "-unrotated"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--caches", default="f16,q8_0,q4_0,q4_0-unrotated")
    parser.add_argument("--tasks", default="needles")
    parser.add_argument("--prompts", type=int, default=4, help="of each task")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--data", default=str(HELD_OUT))
    options = parser.parse_args()
    # Keep only errors of llama.cpp's log.
    silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silence, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    rows = options.texts + 2 * options.prompts
    data = Data(source=options.data, tokens=rows * options.length, length=options.length)
    print(f"{'model':16s} {'cache':16s} {'loss':>8s} {'simulated':>10s} answers, simulated")
    for name in options.models:
        compare(name, data, options)
    return 0


def compare(name: str, data: Data, options: argparse.Namespace) -> None:
    """Print one row per cache of one model."""
    loaded = load(name, torch.float32, data)
    model, rows = loaded.model, loaded.text.rows
    layers = {layer.index for layer in loaded.geometry}
    texts = torch.stack(rows[: options.texts]).to(model.device)
    prompts = write_all(name, torch.cat(rows[options.texts :]).tolist(), options)
    label = Path(name).name
    exact = score(model, texts, prompts)
    print(f"{label:16s} {'torch, exact':16s} {exact[0]:8.4f} {'':10s} {exact[1]:.1%}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(model, path)
        for cache in options.caches.split(","):
            real = score(LlamaCpp(path, cache, options.length), texts, prompts)
            simulated, answers = "", ""
            if cache in ENGINE_CACHES:
                arm = EngineArm(cache, ENGINE_CACHES[cache])
                simulation = Simulation(arm, CacheLayout(sink=0, recent=0), loaded.geometry, layers)
                loss, share = score(model, texts, prompts, simulation.running(model))
                simulated, answers = f"{loss:.4f}", f"{share:.1%}"
            line = f"{label:16s} {cache:16s} {real[0]:8.4f} {simulated:>10s} {real[1]:.1%}"
            print(f"{line}  {answers}", flush=True)


def write_all(model: str, filler: list[int], options: argparse.Namespace) -> list[list[Prompt]]:
    """The prompts of each task."""
    tokenizer = loading.load_tokenizer(find(model))
    tasks = options.tasks.split(",")
    settings = [
        PromptSettings(task, options.prompts, options.length, first=0, recent=64) for task in tasks
    ]
    return [write_prompts(each, tokenizer, filler) for each in settings]


@torch.no_grad()
def score(
    model: Any, texts: torch.Tensor, prompts: list[list[Prompt]], context: Any = None
) -> tuple[float, float]:
    """The mean loss of the second half of each text, and the share of right answers."""
    with context or nullcontext():
        losses = [losses_of(model, row, texts.shape[1] // 2) for row in texts.split(1)]
        correct = [answers_of(model, rows).correct for rows in prompts]
    return torch.cat(losses).mean().item(), torch.cat(correct).double().mean().item()


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write a model as a GGUF file that llama.cpp reads token ids with."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise SystemExit(f"{config.model_type} is not one of {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(path, config.model_type)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(written, tensor.float().cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """A model that llama.cpp runs with one type of KV cache, called like one of transformers."""

    device = torch.device("cpu")

    def __init__(self, path: Path, cache: str, length: int):
        os.environ["LLAMA_ATTN_ROT_DISABLE"] = str(int(cache.endswith(UNROTATED)))
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = length
        parameters.n_ubatch = min(length, 512)
        parameters.type_k = parameters.type_v = TYPES[cache.removesuffix(UNROTATED)]
        parameters.flash_attn_type = 1  # a quantized value cache needs it
        parameters.n_threads = parameters.n_threads_batch = torch.get_num_threads()
        model_parameters = llama_cpp.llama_model_default_params()
        model_parameters.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(bytes(path), model_parameters)
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.model or not self.context:
            raise SystemExit(f"llama.cpp could not load {path} with the cache {cache}")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.words = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def __call__(self, input_ids: torch.Tensor, logits_to_keep: int, **_: Any) -> SimpleNamespace:
        """The last `logits_to_keep` logits of token ids `[B, T]`."""
        logits = [self._read(row.tolist(), logits_to_keep) for row in input_ids]
        return SimpleNamespace(logits=torch.stack(logits))

    def _read(self, ids: list[int], kept: int) -> torch.Tensor:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for position, token in enumerate(ids):
            batch.token[position], batch.pos[position] = token, position
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
            batch.logits[position] = position >= len(ids) - kept
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama.cpp could not read {len(ids)} tokens: status {status}")
        logits = llama_cpp.llama_get_logits(self.context)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (kept, self.words)).copy())


if __name__ == "__main__":
    sys.exit(main())
