"""Train the demo model that ships with rotationzoo, and other small models to choose and judge
rotations on (docs/history.md and docs/results.md). All of them answer
questions about their context.

    python scripts/lab/train_lab_models.py OUTPUT [--models demo,qwen3,biased,llama]
        [--text FOLDER ...] [--start-token] [--seed N] [--minutes M | --steps N] [--check-on-cpu]

Writes a folder OUTPUT/NAME for each model as soon as it is trained: the model in bfloat16, its
tokenizer, and lab.json with what it answers. `--minutes` is the time of the whole call, in which
the schedules of all models come to their ends: each gets its share of what is left.

The text is Python source, by default the standard library of the Python that runs this (PSF
licence). The bundled calibration and evaluation texts are files of that library; they are left out
by their content, so no model has seen them. Three quarters of the rows hide recall tasks
(`lab_rows`), in rows of 2,048 tokens and, in the second part of training, of 8,192.

The models have 4 layers of width 256, tied embeddings and the bundled tokenizer, a BPE of 2,048
tokens. They differ in what makes a 2-bit cache hard, and nothing of it is added after
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
    real-like   what SmolLM2-135M has, on 12 layers of width 576: 9 query heads on 3 KV heads of
                64, no norms, keys that share a mean, and queries that share a direction. Train it
                with --start-token, which becomes an attention sink
"""

import argparse
import json
import math
import platform
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import lab_rows
import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rotationzoo.model.source import DEMO
from rotationzoo.recall.answers import join_answers, read_answers
from rotationzoo.recall.prompts import Prompt

Rows = tuple[torch.Tensor, torch.Tensor]
"""Token ids `[N, T]`, and the weight of each token in the loss."""
LONGEST = 8192
WARM_UP, LAST_RATE = 100, 0.01  # steps, and the share of the learning rate at the end
LONG_FROM, LONG_EVERY = 0.4, 4  # every fourth step is of long rows, after this share of training
REPORT = 500  # steps
SCORING_SECONDS = 12  # of a model's time, kept for its final scores and files


def widen_slow_key_biases(model: PreTrainedModel) -> None:
    """Draw the key biases of the slower half of the RoPE pairs with a standard deviation of 4.
    Large Qwen2 models learn such biases by themselves."""
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.view(-1, 2, layer.self_attn.head_dim // 2)
        bias[..., bias.shape[-1] // 2 :].normal_(0, 4)


def share_means(model: PreTrainedModel) -> None:
    """Draw biases of queries and keys in the slowest quarter of the RoPE pairs, the same for all
    query heads of a KV head: what is shared there stays after RoPE, as in SmolLM2-135M."""
    for layer in model.model.layers:
        attention = layer.self_attn
        heads, pairs = model.config.num_key_value_heads, attention.head_dim // 2
        for projection in (attention.q_proj, attention.k_proj):
            slow = projection.bias.view(heads, -1, 2, pairs)[..., 3 * pairs // 4 :]
            slow[:] = 1.5 * torch.randn_like(slow[:, :1])


def peak_norms(model: PreTrainedModel) -> None:
    """Draw the weights of the query and key norms from a log-normal distribution, one for each RoPE
    pair. `C_Q` then has about the effective rank that it has in large models."""
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.copy_((0.8 * torch.randn(norm.weight.shape[0] // 2)).exp().repeat(2))


@dataclass(frozen=True)
class Lab:
    """One model: how it differs from the others, and how it is trained."""

    model_type: str
    config: dict = field(default_factory=dict)
    share: float = 1.0
    """Its part of the time, relative to the other models."""
    learning_rate: float = 2e-3
    weight_decay: float = 0.3
    prepare: Callable[[PreTrainedModel], None] | None = None
    """What is done to the model before training."""


NO_NORMS = {"learning_rate": 3e-3, "weight_decay": 0.0}
SMOLLM2 = {
    "attention_bias": True, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 12,
    "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
MODELS = {
    "demo": Lab("qwen3", share=2.0),
    "qwen3": Lab("qwen3", {"head_dim": 128}),
    "peaked": Lab("qwen3", prepare=peak_norms),
    "biased": Lab("llama", {"attention_bias": True}, prepare=widen_slow_key_biases),
    "llama": Lab("llama", **NO_NORMS),
    "real-like": Lab("llama", SMOLLM2, learning_rate=1e-3, weight_decay=0.0, prepare=share_means),
    "llama-gqa4": Lab("llama", {"head_dim": 128, "num_attention_heads": 8}, **NO_NORMS),
}


@dataclass(frozen=True)
class Size:
    """How much is trained; `SMALL` shows on a CPU that the script works."""

    rows: int = 80_000
    long_rows: int = 8_000
    length: int = 2048
    long_length: int = LONGEST
    prompts: int = 16
    batch: int = 48
    """Rows of `length` tokens a step."""
    config: dict = field(default_factory=dict)
    """What replaces the shape of every model."""


SMALL = Size(
    80, 80, 1024, 2048, 1, 2,
    {"hidden_size": 144, "intermediate_size": 128, "num_hidden_layers": 2},
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What the training of all models shares."""

    output: Path
    rows: list[Rows]
    """Shorter ones, and longer ones."""
    tokenizer: Tokenizer
    size: Size
    seed: int
    steps: int | None
    """Of every model; None where the time ends its training."""


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


def loss_of(model: PreTrainedModel, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted mean loss of predicting ids `[B, T]`. Layers get no mask: with one, attention is
    not flash attention."""
    tower = model.model
    hidden = tower.embed_tokens(ids)
    rope = tower.rotary_emb(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in tower.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rope)
    logits = model.lm_head(tower.norm(hidden))[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
    )
    weight = weights[:, 1:].flatten().float()
    return (losses * weight).sum() / weight.sum()


class Trainer:
    """One model in training, with its rows on its device."""

    def __init__(self, name: str, run: Run, device: str):
        self.name, self.run, self.lab, self.device = name, run, MODELS[name], device
        torch.manual_seed(run.seed + sorted(MODELS).index(name))
        words = run.tokenizer.eos_token_id, len(run.tokenizer)
        self.model = new_model(self.lab, run.size, *words).to(device)
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
        self.loss = loss_of if device == "cpu" else torch.compile(loss_of, dynamic=False)
        self.rows = [(ids.to(device), weights.to(device)) for ids, weights in run.rows]
        tokens = run.size.batch * run.size.length
        self.batches = [max(1, tokens // ids.shape[1]) for ids, _ in self.rows]

    def train(self, stop: float) -> dict[str, float]:
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
                self.say(f"step {step}, {progress:.0%}, loss {loss.item():.3f}")
        return {"steps": step, "seconds": round(time.time() - start), "loss": loss.item()}

    def gradients(self, long: bool) -> torch.Tensor:
        """The loss of a random batch, whose gradients are added to the parameters'."""
        ids, weights = self.rows[long]
        at = torch.randint(len(ids), (self.batches[long],), device=self.device)
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(self.model, ids[at].long(), weights[at])
        loss.backward()
        return loss.detach()

    def score(self, prompts: dict[str, list[Prompt]]) -> dict[str, float]:
        """The share of right answers of each task."""
        shares = {}
        with torch.autocast(self.device, torch.bfloat16):
            for task, rows in prompts.items():
                batches = (rows[at : at + 8] for at in range(0, len(rows), 8))
                correct = join_answers([read_answers(self.model, each) for each in batches]).correct
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


def train_all(run: Run, names: list[str], deadline: float, device: str) -> list[str]:
    """Train models one after another until a `deadline` in seconds since the epoch; returns the
    names of those that failed."""
    # Some versions of transformers multiply positions and frequencies as matrices. In TF32 the
    # angles would be wrong by a radian at 2,048 tokens, and a model would learn those.
    torch.set_float32_matmul_precision("highest")
    failed = []
    for at, name in enumerate(names):
        share = MODELS[name].share / sum(MODELS[other].share for other in names[at:])
        stop = time.time() + (deadline - time.time()) * share - SCORING_SECONDS
        try:
            trainer = Trainer(name, run, device)
            record = trainer.train(stop)
            trainer.model.to(torch.bfloat16).eval()
            folder = run.output / name
            save(trainer.model, run.tokenizer, folder)
            record |= describe(trainer)
            trainer.say(json.dumps(record))
            (folder / "lab.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except Exception:  # the other models shall not be lost with this one
            traceback.print_exc()
            failed.append(name)
    return failed


def start_texts(tokenizer: Tokenizer) -> None:
    """Let all texts start with the end token, as many models' do."""
    end = str(tokenizer.eos_token)
    start = TemplateProcessing(
        single=[end, "$A"], special_tokens=[(end, int(tokenizer.eos_token_id))]
    )
    tokenizer.backend_tokenizer.post_processor = start


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model and its tokenizer into a folder."""
    settings = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = LONGEST
    model.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    written = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(written, encoding="utf-8")


def describe(trainer: Trainer) -> dict[str, object]:
    """What a trained model answers at every length, what plain text costs it, and its recipe."""
    size, tokenizer, record = trainer.run.size, trainer.run.tokenizer, {}
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


def write_all_rows(tokenizer: Tokenizer, texts: list[str], size: Size, seed: int) -> list[Rows]:
    """The rows of both lengths, the shorter ones first."""
    start, tokens = time.time(), lab_rows.tokens_of(texts, tokenizer)
    source = lab_rows.Source(tokenizer, tokens, lab_rows.common_words(texts[:5000]), seed)
    print(f"{len(texts):,} files, {len(source.tokens):,} tokens", flush=True)
    rows = []
    for length, count in ((size.length, size.rows), (size.long_length, size.long_rows)):
        rows.append(tuple(map(torch.from_numpy, lab_rows.write_rows(source, length, count))))
        print(f"{len(rows[-1][0]):,} rows of {length}, {time.time() - start:.0f} s", flush=True)
    return rows


def main() -> int:
    start = time.time()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--models", default="demo,qwen3,biased,llama")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--text", type=Path, nargs="+", default=[stdlib], metavar="FOLDER")
    parser.add_argument("--start-token", action="store_true", help="that all texts begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole call")
    parser.add_argument("--steps", type=int, help="of every model, in place of --minutes")
    parser.add_argument("--check-on-cpu", action="store_true", help="20 steps of tiny models")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - MODELS.keys():
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    size, steps = Size(), options.steps
    if options.check_on_cpu:
        size, steps = SMALL, 20
    device = "cuda" if torch.cuda.is_available() and not options.check_on_cpu else "cpu"
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(DEMO, model_max_length=LONGEST)
    if options.start_token:
        start_texts(tokenizer)
    rows = write_all_rows(tokenizer, lab_rows.read_sources(options.text), size, options.seed)
    run = Run(options.output, rows, tokenizer, size, options.seed, steps)
    failed = train_all(run, names, start + 60 * options.minutes, device)
    print(f"{time.time() - start:.0f} s; failed: {', '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
