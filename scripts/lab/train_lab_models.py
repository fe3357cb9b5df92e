"""Train the demo model that ships with rotationzoo, and other small models to choose and judge
rotations on. All of them answer questions about their context.

    python scripts/lab/train_lab_models.py OUTPUT [--models demo,qwen3,biased,llama]
        [--text FOLDER ...] [--seed N] [--minutes M | --steps N] [--jobs N]
    python scripts/lab/train_lab_models.py OUTPUT --set dev|test --text FOLDER ...
    python scripts/lab/train_lab_models.py OUTPUT --check-on-cpu

Writes a folder OUTPUT/NAME for each model as soon as it is trained: the model in bfloat16, its
tokenizer, and lab.json with what it answers. `--minutes` is the time of the whole call, in which
the schedule of every model comes to its end; `--jobs` models are trained at a time, on one GPU or
on several, and each gets a share of its lane's time.

The text is source code and documentation, by default the standard library of the Python that runs
this (PSF licence). The bundled calibration and evaluation texts are files of that library; they are
left out by their content, so no model has seen them. Three quarters of the rows hide recall tasks
(`lab_rows`), in rows of 2,048 tokens and, in the second part of training, of 8,192.

The small models have 4 layers of width 256, tied embeddings and the bundled tokenizer, a BPE of
2,048 tokens. They differ in what makes a 2-bit cache hard, and nothing of it is added after
training:

    demo        Qwen3, 4 query heads on 2 KV heads of 64; the model that ships
    qwen3       Qwen3 with heads of 128
    peaked      Qwen3 whose query and key norms begin with log-normal weights, which concentrates
                the queries as in large models
    biased      Qwen2's architecture: no norms of queries and keys, but biases; those of the keys'
                slow RoPE channels are drawn 4 wide before training. It is stored as a Llama with
                biases, because transformers gives every Qwen2 the tokenizer of Qwen2
    llama       no norms of queries and keys, a high learning rate, no weight decay
    llama-gqa4  the same with 8 query heads on 2 KV heads of 128

The deep models have 12 to 24 layers, 70 to 115 M parameters, heads of 128, and a BPE of 16,384
tokens trained on the text (OUTPUT/tokenizer). The call also writes OUTPUT/calibration.jsonl and
OUTPUT/evaluation.jsonl, files of the text that no model is trained on. Recipes are chosen on the
set `dev` and judged on the set `test`:

    deep-qwen3      12 layers, 12 query heads on 4 KV heads                                  (dev)
    deep-biased     16 layers, 8 on 2; key biases as in `biased`                             (dev)
    deep-towering   20 layers, 8 on 1; query and key norms begin with log-normal weights     (dev)
    deep-llama      16 layers, 10 on 2; no norms and no biases                               (test)
    tall-qwen3      24 layers, 8 on 2                                                        (test)
    wide-towering   12 layers, 12 on 2; norms as in `deep-towering`, less wide               (test)

More deep models belong to neither set and are trained with --models:

    deep-gpt-oss    gpt-oss of 12 layers, 16 on 4 heads of 64: learned sinks, a window of 128 in
                    every other layer, biases, two experts that every token mixes
    deep-mla        12 layers, 12 heads of 64 + 64 (RoPE); the architecture of DeepSeek V3,
                    without experts: the cache holds a latent of 256 and a RoPE key of 64
"""

import argparse
import json
import math
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import lab_rows
import lab_sinks
import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rotationzoo.model.source import DEMO
from rotationzoo.recall.answers import read_answers
from rotationzoo.recall.prompts import Prompt

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[1, T, D]`."""
LONGEST = 8192
WARM_UP, LAST_RATE = 100, 0.01  # steps, and the share of the learning rate at the end
LONG_FROM, LONG_EVERY = 0.4, 4  # every fourth step is of long rows, after this share of training
REPORT = 500  # steps
SCORING_SECONDS = 12  # of a model's time, kept for its final scores and files
HELD_OUT = 40  # one file in so many calibrates the deep models, and another judges them
TOKENIZER_FILES = 4000


def widen_slow_key_biases(model: PreTrainedModel) -> None:
    """Draw the key biases of the slower half of the RoPE pairs with a standard deviation of 4.
    Large Qwen2 models learn such biases by themselves."""
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.view(-1, 2, layer.self_attn.head_dim // 2)
        bias[..., bias.shape[-1] // 2 :].normal_(0, 4)


def draw_norms(model: PreTrainedModel, spread: float, is_scaled: bool = True) -> None:
    """Draw the weights of the query and key norms from a log-normal distribution, one for each RoPE
    pair, `is_scaled` to a mean square of 1. `C_Q` then has about the effective rank that it has in
    large models: a spread of .8 gives it before training. After training, .9 and scaled gave .2 D;
    published pairs have .4 D."""
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            pairs = (spread * torch.randn(norm.weight.shape[0] // 2)).exp()
            if is_scaled:
                pairs /= pairs.square().mean().sqrt()
            norm.weight.copy_(pairs.repeat(2))


peak_norms = partial(draw_norms, spread=0.8, is_scaled=False)
tower_norms = partial(draw_norms, spread=0.9)


@dataclass(frozen=True)
class Lab:
    """One model: how it differs from the others, and how it is trained."""

    model_type: str
    config: dict = field(default_factory=dict)
    batch: int = 48
    """Rows of 2,048 tokens a step."""
    share: float = 1.0
    """Its part of the time, relative to the other models of its lane."""
    learning_rate: float = 2e-3
    weight_decay: float = 0.3
    prepare: Callable[[PreTrainedModel], None] | None = None
    """What is done to the model before training."""


NO_NORMS = {"learning_rate": 3e-3, "weight_decay": 0.0}
MODELS = {
    "demo": Lab("qwen3", share=2.0),
    "qwen3": Lab("qwen3", {"head_dim": 128}),
    "peaked": Lab("qwen3", prepare=peak_norms),
    "biased": Lab("llama", {"attention_bias": True}, prepare=widen_slow_key_biases),
    "llama": Lab("llama", **NO_NORMS),
    "llama-gqa4": Lab("llama", {"head_dim": 128, "num_attention_heads": 8}, **NO_NORMS),
}


def deep(
    model_type: str,
    layers: int,
    width: int,
    heads: tuple[int, int],
    prepare: Callable[[PreTrainedModel], None] | None = None,
    **config: object,
) -> Lab:
    """A deep model with so many query and KV heads, of 128 unless `config` says otherwise."""
    shape = {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 3 * width,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128,
    }  # fmt: skip
    return Lab(
        model_type, shape | config, 24, learning_rate=1.2e-3, weight_decay=0.1, prepare=prepare
    )


SETS = {
    "dev": {
        "deep-biased": deep("llama", 16, 640, (8, 2), widen_slow_key_biases, attention_bias=True),
        "deep-qwen3": deep("qwen3", 12, 768, (12, 4)),
        "deep-towering": deep("qwen3", 20, 512, (8, 1), tower_norms),
    },
    "test": {
        "deep-llama": deep("llama", 16, 640, (10, 2)),
        "wide-towering": deep("qwen3", 12, 768, (12, 2), partial(draw_norms, spread=0.6)),
        "tall-qwen3": deep("qwen3", 24, 512, (8, 2)),
    },
}
"""The deep models. The set `test` was named before anything was measured on either."""
DEEP_MLA = deep(
    "deepseek_v3", 12, 768, (12, 12), first_k_dense_replace=12, q_lora_rank=None, kv_lora_rank=256,
    # Queries and keys get as wide as values, or flash attention would refuse them.
    qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128, num_nextn_predict_layers=0,
    head_dim=64,  # what DeepSeek's configuration calls so: the RoPE part
)  # fmt: skip
"""Three inputs of a layer share one element of its latent; in DeepSeek V2 Lite, four do."""
DEEP = SETS["dev"] | SETS["test"]
DEEP |= {
    "deep-mla": DEEP_MLA,
    "deep-gpt-oss": deep(
        "gpt_oss", 12, 768, (16, 4), lab_sinks.train_densely, head_dim=64, sliding_window=128,
        intermediate_size=1152, num_local_experts=2, num_experts_per_tok=2,
    ),
}  # fmt: skip
MODELS |= DEEP


@dataclass(frozen=True)
class Size:
    """How much is trained; `SMALL` shows on a CPU that the script works."""

    rows: int = 80_000
    long_rows: int = 8_000
    length: int = 2048
    long_length: int = LONGEST
    prompts: int = 16
    config: dict = field(default_factory=dict)
    """What replaces the shape of every model."""
    batch: int | None = None
    vocabulary: int = 16_384


SMALL = Size(
    80, 80, 1024, 2048, 1, {"hidden_size": 120, "intermediate_size": 128, "num_hidden_layers": 2},
    batch=2, vocabulary=1024,
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What all lanes share. Either `steps` or `deadline` (seconds since the epoch) ends a model's
    training."""

    output: Path
    rows: Path
    tokenizer: Path
    size: Size
    seed: int
    steps: int | None
    deadline: float


def new_model(lab: Lab, size: Size, end_token: int, vocabulary: int) -> PreTrainedModel:
    """The model before training, in float32 on the CPU."""
    settings = {
        "vocab_size": vocabulary, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": LONGEST, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": end_token, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    }  # fmt: skip
    config = AutoConfig.for_model(lab.model_type, **{**settings, **lab.config, **size.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if lab.prepare is not None:
        with torch.no_grad():
            lab.prepare(model)
    return model


def run_layer(layer: nn.Module, hidden: torch.Tensor, rope: Rope) -> torch.Tensor:
    """What a layer makes of `hidden` `[B, T, C]`, without a mask: with one, attention is not flash
    attention."""
    return layer(hidden, attention_mask=None, position_embeddings=rope)


def weigh_losses(
    model: PreTrainedModel, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted mean loss of predicting `ids` `[B, T]` from the last layer's output."""
    logits = model.lm_head(model.model.norm(hidden))[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
    weight = weights[:, 1:].flatten().float()
    return (losses * weight).sum() / weight.sum()


@dataclass(frozen=True)
class Loss:
    """The weighted mean loss of predicting ids `[B, T]`. Its two parts can be compiled: all layers
    then share one compilation, which takes a fraction of that of a whole deep model."""

    run_layer: Callable[..., torch.Tensor] = run_layer
    weigh_losses: Callable[..., torch.Tensor] = weigh_losses

    def __call__(
        self, model: PreTrainedModel, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        tower = model.model
        hidden = tower.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rope = tower.rotary_emb(hidden, positions)
        for layer in tower.layers:
            hidden = self.run_layer(layer, hidden, rope)
        return self.weigh_losses(model, hidden, ids, weights)


loss_of = Loss()


class Trainer:
    """One model in training, with its rows on its device."""

    def __init__(self, name: str, run: Run, tokenizer: Tokenizer, device: str):
        self.name, self.run, self.lab, self.device = name, run, MODELS[name], device
        torch.manual_seed(run.seed + sorted(MODELS).index(name))
        new = new_model(self.lab, run.size, tokenizer.eos_token_id, len(tokenizer))
        self.model = new.to(device)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.lab.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.lab.learning_rate, betas=(0.9, 0.95), fused=device != "cpu"
        )
        torch.compiler.reset()  # its limit counts the compilations of all models of a process
        # Compiling for a CPU takes longer than the few steps that are made there.
        self.loss = loss_of
        if device != "cpu":
            parts = (torch.compile(part, dynamic=False) for part in (run_layer, weigh_losses))
            self.loss = Loss(*parts)
        self.rows = [load_rows(run.rows / f"{kind}.npz", device) for kind in ("short", "long")]
        tokens = (run.size.batch or self.lab.batch) * run.size.length
        self.batches = [max(1, tokens // ids.shape[1]) for ids, _ in self.rows]

    def train(self, stop: float, prompts: dict[str, list[Prompt]]) -> dict[str, float]:
        """Train until the time `stop`, or for the run's number of steps."""
        for long in (False, True):  # compiled before the clock of the schedule starts
            self.gradients(long)
            self.optimizer.zero_grad(set_to_none=True)
        start, step, progress, loss = time.time(), 0, 0.0, torch.zeros(())
        self.say(f"compiled, {stop - start:.0f} s to train")
        while progress < 1:
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            rate = min((step + 1) / WARM_UP, LAST_RATE + (1 - LAST_RATE) * cosine)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * self.lab.learning_rate
            loss = self.gradients(progress >= LONG_FROM and step % LONG_EVERY == 0)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 20 == 0 or self.run.steps:
                loss.item()  # waits for the GPU, or else the clock would run ahead of it
            if self.run.steps:
                progress = step / self.run.steps
            else:
                progress = (time.time() - start) / (stop - start)
            if step % REPORT == 0:
                self.say(
                    f"step {step}, {progress:.0%}, loss {loss.item():.3f}; {self.score(prompts)}"
                )
        return {"steps": step, "seconds": round(time.time() - start), "loss": loss.item()}

    def gradients(self, long: bool) -> torch.Tensor:
        """The loss of a random batch, whose gradients are added to the parameters'."""
        ids, weights = self.rows[long]
        at = torch.randint(len(ids), (self.batches[long],), device=self.device)
        with torch.autocast(self.device.split(":")[0], torch.bfloat16):
            loss = self.loss(self.model, ids[at].long(), weights[at])
        loss.backward()
        return loss.detach()

    def score(self, prompts: dict[str, list[Prompt]]) -> dict[str, float]:
        """The share of right answers of each task."""
        shares = {}
        with torch.autocast(self.device.split(":")[0], torch.bfloat16):
            for task, rows in prompts.items():
                correct = read_answers(self.model, rows, batch=8).correct
                shares[task] = round(correct.float().mean().item(), 4)
        return shares

    @torch.no_grad()
    def text_loss(self, ids: np.ndarray) -> float:
        """Nats a token of plain text, in rows of the shorter length."""
        length = self.run.size.length
        rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length).long()
        weights = torch.ones(1, length, device=self.device)
        losses = [loss_of(self.model, row[None].to(self.device), weights).item() for row in rows]
        return round(sum(losses) / len(losses), 4)

    def say(self, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {self.name}: {text}", flush=True)


def load_rows(path: Path, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(path) as arrays:
        return tuple(torch.from_numpy(arrays[key]).to(device) for key in ("ids", "weights"))


def train_lane(run: Run, names: list[str], device: str) -> list[str]:
    """Train some models one after another; returns the names of those that failed."""
    if device != "cpu":
        torch.cuda.set_device(device)
    # Some versions of transformers multiply positions and frequencies as matrices. In TF32 the
    # angles would be wrong by a radian at 2,048 tokens, and a model would learn those.
    torch.set_float32_matmul_precision("highest")
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer, model_max_length=LONGEST)
    prompts = lab_rows.unseen_prompts(tokenizer, run.size.length, run.size.prompts)
    failed = []
    for at, name in enumerate(names):
        share = MODELS[name].share / sum(MODELS[other].share for other in names[at:])
        stop = time.time() + (run.deadline - time.time()) * share - SCORING_SECONDS
        try:
            trainer = Trainer(name, run, tokenizer, device)
            record = trainer.train(stop, prompts)
            trainer.model.to(torch.bfloat16).eval()
            folder = run.output / name
            save(trainer.model, run.tokenizer, folder)
            if name not in DEEP:  # whoever asks those has the time for more questions
                record |= describe(trainer, tokenizer)
            trainer.say(json.dumps(record))
            (folder / "lab.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except Exception:  # the other models shall not be lost with this one
            traceback.print_exc()
            failed.append(name)
    return failed


def save(model: PreTrainedModel, tokenizer: Path, folder: Path) -> None:
    """Write the model and its tokenizer into a folder."""
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = LONGEST
    model.save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    written = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(written, encoding="utf-8")


def describe(trainer: Trainer, tokenizer: Tokenizer) -> dict[str, object]:
    """What a trained model answers at every length, what plain text costs it, and its recipe."""
    size, record = trainer.run.size, {}
    for length in sorted({size.length, 2 * size.length, size.long_length}):
        prompts = max(1, size.prompts * size.length // length)
        record[f"answers at {length}"] = trainer.score(
            lab_rows.unseen_prompts(tokenizer, length, prompts)
        )
    for name in lab_rows.BUNDLED:
        ids = lab_rows.tokens_of(lab_rows.bundled_texts(name), tokenizer)
        record[f"loss on {name}.jsonl"] = trainer.text_loss(ids)
    recipe = {key: value for key, value in asdict(trainer.lab).items() if key != "prepare"}
    return record | {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "recipe": recipe,
        "seed": trainer.run.seed,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def write_all_rows(run: Run, texts: list[str]) -> None:
    """Write the rows of both lengths."""
    start, size = time.time(), run.size
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer, model_max_length=LONGEST)
    tokens = lab_rows.tokens_of(texts, tokenizer)
    source = lab_rows.Source(tokenizer, tokens, lab_rows.common_words(texts[:5000]), run.seed)
    print(f"{len(texts):,} files, {len(source.tokens):,} tokens", flush=True)
    kinds = {"short": (size.length, size.rows), "long": (size.long_length, size.long_rows)}
    for kind, (length, count) in kinds.items():
        ids, weights = lab_rows.write_rows(source, length, count)
        np.savez(run.rows / f"{kind}.npz", ids=ids, weights=weights)
        print(f"{len(ids):,} rows of {length}, {time.time() - start:.0f} s", flush=True)


def prepare_text(output: Path, texts: list[str], size: Size) -> list[str]:
    """Train the tokenizer of the deep models, and hold out files for calibration and evaluation;
    returns the texts to train on."""
    held_out = {"calibration": texts[0::HELD_OUT], "evaluation": texts[1::HELD_OUT]}
    for name, documents in held_out.items():
        lines = [json.dumps({"text": text}) + "\n" for text in documents]
        (output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    rest = [text for number, text in enumerate(texts) if number % HELD_OUT > 1]
    bundled = AutoTokenizer.from_pretrained(DEMO)
    sample = rest[:TOKENIZER_FILES]
    bundled.train_new_from_iterator(sample, size.vocabulary).save_pretrained(output / "tokenizer")
    return rest


def lanes_of(names: list[str], jobs: int) -> list[list[str]]:
    """The models dealt to lanes, so that the shares of the lanes are about equal."""
    lanes: list[list[str]] = [[] for _ in range(min(jobs, len(names)))]
    for name in sorted(names, key=lambda name: -MODELS[name].share):
        min(lanes, key=lambda lane: sum(MODELS[other].share for other in lane)).append(name)
    return lanes


def main() -> int:
    start = time.time()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--models", default="demo,qwen3,biased,llama")
    parser.add_argument(
        "--set", choices=SETS, help="the deep models of a set, in place of --models"
    )
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--text", type=Path, nargs="+", default=[stdlib], metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole call")
    parser.add_argument("--steps", type=int, help="of every model, in place of --minutes")
    parser.add_argument("--jobs", type=int, default=2, help="models trained at a time")
    parser.add_argument("--rows", type=int, default=Size.rows, help="of 2,048 tokens")
    parser.add_argument("--check-on-cpu", action="store_true", help="20 steps of tiny models")
    options = parser.parse_args()
    names = list(SETS[options.set]) if options.set else options.models.split(",")
    if unknown := set(names) - MODELS.keys():
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if len({name in DEEP for name in names}) > 1:
        parser.error("small and deep models have different tokenizers: train them in two calls")
    size, steps = replace(Size(), rows=options.rows), options.steps
    if options.check_on_cpu:
        size, steps = SMALL, 20
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if options.check_on_cpu or not devices:
        devices = ["cpu"]
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        is_deep = names[0] in DEEP
        texts = lab_rows.read_sources(options.text, everything=is_deep)
        tokenizer = options.output / "tokenizer" if is_deep else DEMO
        if is_deep:
            texts = prepare_text(options.output, texts, size)
        deadline = start + 60 * options.minutes
        run = Run(options.output, Path(work), tokenizer, size, options.seed, steps, deadline)
        write_all_rows(run, texts)
        lanes = lanes_of(names, options.jobs)
        # Threads of several lanes would wait for each other on the same cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(len(lanes), mp_context=get_context("spawn")) as pool:
            jobs = [
                pool.submit(train_lane, run, lane, devices[number % len(devices)])
                for number, lane in enumerate(lanes)
            ]
            failed = [name for job in jobs for name in job.result()]
    print(f"{time.time() - start:.0f} s; failed: {', '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
