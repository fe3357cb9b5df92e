"""How well `verify --run` tells a model's own rotations from those of other models: the agreements
of many pairs of small models.

    python scripts/check_membership.py

Own: rotations of the demo model, of random models and of copies with channel outliers, each
calibrated on texts of four kinds. Related: copies with noise in their weights or rescaled channels.
Foreign: other random weights, and layers in reverse order. Prints for each kind of pair the range
of the lower of the two agreements.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from loading import load

from rotationzoo import recipe
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import target_moment
from rotationzoo.checks.membership import TEXT, measure_agreement
from rotationzoo.linalg.compositions import eigenbasis
from rotationzoo.model import loading
from rotationzoo.model.geometry import cached_layers, geometry_of
from rotationzoo.model.source import find
from rotationzoo.recipe import Data
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import read_corpus

ROOT = Path(__file__).parents[1]
SHAPES = {
    "16": {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 4},
    "64": {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4},
    "32, 4 query heads a KV head": {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8},
}
Moments = dict[tuple[int, str], torch.Tensor]
Model = transformers.PreTrainedModel


def rescaled(model: Model, sigma: float, seed: int) -> Model:
    """A copy that computes the same with channels of keys and values of other sizes."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        attention = layer.self_attn
        dim = attention.head_dim
        keys = torch.exp(sigma * torch.randn(dim // 2, generator=generator))
        keys = keys.repeat(2)  # RoPE turns channels i and i + D/2 into each other
        attention.q_norm.weight.data /= keys
        attention.k_norm.weight.data *= keys
        heads = attention.k_proj.out_features // dim
        values = torch.exp(sigma * torch.randn(heads, dim, generator=generator))
        attention.v_proj.weight.data *= values.reshape(-1, 1)
        group = attention.q_proj.out_features // attention.k_proj.out_features
        attention.o_proj.weight.data /= values.repeat_interleave(group, 0).reshape(1, -1)
    return model


def noised(model: Model, size: float, seed: int) -> Model:
    """A copy with noise in every matrix, `size` times as large as its entries."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += size * parameter.data.std() * noise
    return model


def random_model(config: transformers.PretrainedConfig, seed: int) -> Model:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=0.2)
    return model


def rearranged(model: Model, order: Callable[[list], list]) -> Model:
    """A copy with its layers in another order."""
    model = copy.deepcopy(model)
    states = order([copy.deepcopy(layer.state_dict()) for layer in model.model.layers])
    for layer, state in zip(model.model.layers, states, strict=True):
        layer.load_state_dict(state)
    return model


def families(demo: Model) -> dict[str, dict[str, dict[str, Model]]]:
    """Shape -> family -> models by their kin to the first, which has no name. Models of one family
    are related, and those of two are foreign to each other."""
    related = {f"noise {size}": noised(demo, size, 1) for size in (0.02, 0.1, 0.3, 1.0)}
    related |= {f"channels {sigma}": rescaled(demo, sigma, 1) for sigma in (0.2, 0.4, 0.8, 1.5)}
    upside_down = rearranged(demo, lambda states: states[::-1])
    untrained = {f"random {seed}": {"": random_model(demo.config, seed)} for seed in range(4)}
    shapes = {
        "64, trained": {
            "demo": {"": demo, **related},
            "reversed": {"": upside_down},
            **untrained,
        }
    }
    for name, changes in SHAPES.items():
        config = transformers.Qwen3Config(
            vocab_size=2048,
            intermediate_size=32,
            num_hidden_layers=2,
            num_key_value_heads=2,
            eos_token_id=0,
            **changes,
        )
        plain = {f"random {seed}": {"": random_model(config, seed)} for seed in range(6)}
        outliers = {
            f"outliers {seed}": {"": rescaled(random_model(config, seed), 1.0, seed)}
            for seed in (7, 8)
        }
        shapes[name] = plain | outliers
    return shapes


def texts(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, list[torch.Tensor]]:
    """Kind of text -> batches of token ids; the first is the text that `verify --run` reads."""
    prose = ROOT / "rotationzoo" / "data" / "demo" / "LICENSE-PSF.txt"
    sources = {
        "the same": TEXT,
        "code, 2,048 tokens": Data(tokens=2048, length=256, seed=5),
        "code, 8,192 tokens": Data(source=str(HELD_OUT), tokens=8192, length=2048),
        "prose, 2,048 tokens": Data(source=str(prose), tokens=2048, length=512),
    }
    rows = {name: read_corpus(data, tokenizer).batches(1) for name, data in sources.items()}
    ids = torch.randint(0, 2048, (1, 1024), generator=torch.Generator().manual_seed(1))
    return rows | {"random ids": [ids] * 4}


def moments_of(model: Model, batches: list[torch.Tensor]) -> Moments:
    """What the recipe `oscar` would make rotations of, by layer and side."""
    with torch.no_grad():
        geometry = geometry_of(model, batches[0][:, :32])
        settings = recipe.PRESETS["oscar"]
        statistics = collect(model, geometry, batches, settings)
    sides = [(layer.index, side) for layer in cached_layers(geometry) for side in ("key", "value")]
    return {
        (layer, side): target_moment(statistics, settings, layer, side) for layer, side in sides
    }


def lowest(made_of: Moments, measured: Moments) -> float:
    """The agreement that decides, of rotations made of some moments with what a model was measured
    to compute."""
    bases = {place: eigenbasis(moment)[1] for place, moment in made_of.items()}
    return measure_agreement(bases, measured).lowest


def main() -> None:
    transformers.logging.set_verbosity_error()
    demo = load("demo", torch.float32, Data(tokens=2048, length=1024)).model.cpu()
    rows = texts(loading.load_tokenizer(find("demo")))
    print("| head dimension | pairs | number | agreement |\n|---|---|---|---|")
    for shape, members in families(demo).items():
        for kind, values in sorted(agreements(members, rows).items()):
            print(
                f"| {shape} | {kind} | {len(values)} | {min(values):.2f} to {max(values):.2f} |",
                flush=True,
            )


def agreements(
    members: dict[str, dict[str, Model]], rows: dict[str, list[torch.Tensor]]
) -> dict[str, list[float]]:
    """Kind of pair -> the agreement of each: rotations of the first model of each family, made on
    each text, with every model on the text that `verify --run` reads."""
    measured = {
        (family, name): moments_of(model, rows["the same"])
        for family, models in members.items()
        for name, model in models.items()
    }
    by_kind: dict[str, list[float]] = {}
    for family, models in members.items():
        for text in list(rows)[1:]:
            made_of = moments_of(models[""], rows[text])
            for (other_family, name), moments in measured.items():
                if other_family != family:
                    kind = "foreign"
                else:
                    kind = f"related: {name}" if name else f"own: {text}"
                by_kind.setdefault(kind, []).append(lowest(made_of, moments))
    return by_kind


if __name__ == "__main__":
    main()
