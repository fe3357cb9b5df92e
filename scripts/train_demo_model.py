"""Train the demo model that ships with rotationzoo, and cut its calibration and held-out texts.

    python scripts/train_demo_model.py OUTPUT_DIR [STDLIB_DIR]

The text is the source of the CPython standard library (PSF licence), by default that of the Python
running this script. Whole files are set aside for `calibration.jsonl` and `evaluation.jsonl` before
training, so the model has seen neither. The model is a Qwen3 with 4 query heads on 2 KV heads,
head_dim 64, 4 layers, trained in bfloat16 autocast and stored in bfloat16.

The run that made the shipped files (one H200, 157 s, Python 3.11.7's library of 10.3 M training
tokens):

    loss on evaluation.jsonl                      1.895 nats a token
    loss of a unigram model on the same text      6.395 nats a token
    loss on calibration.jsonl, also unseen        1.895 nats a token
    parameters                                    1,870,016
"""

import json
import math
import random
import sys
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 0
VOCABULARY, LENGTH, BATCH, STEPS = 2048, 2048, 48, 3000
LEARNING_RATE, WEIGHT_DECAY, WARM_UP = 3e-3, 0.5, 100
HELD_OUT_BYTES = 320_000  # for each of the two held-out texts
DULL = {"encodings", "pydoc_data", "test", "tests", "lib2to3", "idlelib"}


def documents(root: Path, seed: int) -> tuple[list[str], list[str], list[str]]:
    """The standard library's files as (training, calibration, evaluation) texts, disjoint by
    file."""
    installed = {"site-packages", "dist-packages"}
    texts = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if installed & set(name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            texts[str(name)] = text
    ordinary = [name for name, text in texts.items() if _is_ordinary(name, text)]
    random.Random(seed).shuffle(ordinary)
    held_out: list[list[str]] = [[], []]
    for part in held_out:
        while sum(map(len, part)) < HELD_OUT_BYTES:
            part.append(texts.pop(ordinary.pop()))
    return list(texts.values()), held_out[0], held_out[1]


def _is_ordinary(name: str, text: str) -> bool:
    """Whether a file may be held out: code tables and generated data would make a poor judge."""
    return 4_000 < len(text) < 40_000 and not DULL & set(Path(name).parts)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", model_max_length=LENGTH
    )


def tokens_of(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    ids = [i for text in texts for i in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    return torch.tensor(ids, dtype=torch.int32)


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, device: str) -> float:
    rows = ids[: ids.numel() // LENGTH * LENGTH].view(-1, LENGTH).long().to(device)
    losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    return sum(losses) / len(losses)


def unigram_loss(train: torch.Tensor, held_out: torch.Tensor) -> float:
    counts = torch.bincount(train.long(), minlength=VOCABULARY).double() + 1
    return -(counts / counts.sum()).log()[held_out.long()].mean().item()


def main(output: Path, root: Path) -> None:
    start = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    train_texts, calibration, evaluation = documents(root, SEED)
    tokenizer = train_tokenizer(train_texts)
    train, held_out = tokens_of(train_texts, tokenizer), tokens_of(evaluation, tokenizer)
    # Its loss shows over-fitting; the number of steps was chosen on it.
    unseen = tokens_of(calibration, tokenizer)
    print(f"{train.numel():,} training tokens, {held_out.numel():,} held-out tokens", flush=True)

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=device == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(step / WARM_UP, 0.5 * (1 + math.cos(math.pi * step / STEPS)) + 0.01),
    )
    generator = torch.Generator().manual_seed(SEED)
    offsets = torch.arange(LENGTH)
    for step in range(STEPS):
        starts = torch.randint(train.numel() - LENGTH, (BATCH, 1), generator=generator)
        batch = train[starts + offsets].long().to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 249:
            unseen_loss = held_out_loss(model, unseen, device)
            print(
                f"step {step + 1} loss {loss.item():.4f}, unseen {unseen_loss:.4f}, "
                f"{time.time() - start:.0f} s",
                flush=True,
            )

    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    for name, texts in (("calibration", calibration), ("evaluation", evaluation)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (output / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    print(f"parameters            {sum(p.numel() for p in model.parameters()):,}")
    print(
        f"held-out loss         {held_out_loss(model.float(), held_out, device):.4f} nats a token"
    )
    print(f"unigram held-out loss {unigram_loss(train, held_out):.4f} nats a token")
    print(
        f"Python {sys.version.split()[0]}, {STEPS} steps of {BATCH} x {LENGTH} tokens, "
        f"{time.time() - start:.0f} s"
    )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    main(folder, Path(sys.argv[2] if len(sys.argv) == 3 else sysconfig.get_paths()["stdlib"]))
