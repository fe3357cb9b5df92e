"""Decoding through a simulated cache token by token gives what reading whole rows gives."""

from dataclasses import dataclass, field

import torch
from support import architectures
from support.architectures import families
from support.float64 import CLOSE, to_float64

from rotationzoo.calibration.fit import fit
from rotationzoo.evaluation.arms import build_baselines
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS, Recipe
from rotationzoo.simulation.arm import Arm
from rotationzoo.simulation.layout import CacheLayout
from rotationzoo.simulation.simulated import Simulation, cache_of_all_positions

# Full attention, sliding windows, layers that share a cache, layers without one, and a cache class
# of the family's own.
FAMILIES = "llama", "gemma3", "gemma4", "qwen3_5", "minimax"


@families(FAMILIES)
def test_decoding_reads_what_whole_rows_read(name):
    model = architectures.build(name, torch.float64)
    geometry = geometry_of(model)
    (arm,) = (arm for arm in build_baselines(Recipe(), geometry) if arm.name == "random")
    # Smaller than the sliding windows of these models, so that they read quantized positions.
    cache = CacheLayout(sink=1, recent=2)
    simulation = Simulation(arm, cache, geometry, {layer.index for layer in geometry})
    prompt = torch.randint(5, 60, (1, 20), generator=torch.Generator().manual_seed(0))

    def scores(**options):
        output = model.generate(
            prompt,
            do_sample=False,
            min_new_tokens=6,
            max_new_tokens=6,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **options,
        )
        return torch.stack(output.scores)

    exact = scores()
    kept = cache_of_all_positions(model)
    assert (kept is None) == (name == "minimax")
    with simulation.running(model):
        whole = scores(use_cache=False)
        decoded = scores(past_key_values=kept, use_cache=kept is not None)
    if kept is not None:
        assert kept.get_seq_length(geometry[-1].owner) == 25, "all positions but the last token"
    finite = torch.isfinite(whole)
    assert (decoded - whole)[finite].abs().max() <= CLOSE * whole[finite].abs().max()
    # The codec moves these logits by .2 to 9.
    assert (whole[finite] - exact[finite]).abs().max() > 0.1


@dataclass(frozen=True)
class CountingArm(Arm):
    """An arm that notes how many rows of the first layer's keys each call quantizes."""

    rows: list[int] = field(default_factory=list)

    def fake_quantize(self, rows, layer, side, format):
        if (layer, side) == (0, "key"):
            self.rows.append(rows.shape[2])
        return super().fake_quantize(rows, layer, side, format)


def test_each_row_is_quantized_once_while_a_prompt_is_decoded():
    model = architectures.build("llama", torch.float64)
    geometry = geometry_of(model)
    arm = CountingArm("counting", to_float64(fit(None, PRESETS["random"], geometry)))
    simulation = Simulation(arm, CacheLayout(sink=1, recent=2), geometry, {0, 1})
    prompts = torch.randint(5, 60, (2, 1, 9), generator=torch.Generator().manual_seed(0))

    def decode(prompt):
        options = dict(do_sample=False, min_new_tokens=4, max_new_tokens=4, pad_token_id=0)
        kept = cache_of_all_positions(model)
        return model.generate(prompt, past_key_values=kept, **options).tolist()

    with simulation.running(model):
        first, second = map(decode, prompts)
    # The prompt as a whole, all rows past the sink at the first step, then one row a step.
    assert arm.rows == 2 * [8, 9, 1, 1]
    with simulation.running(model):
        assert decode(prompts[1]) == second, "nothing is left of the prompt before"
    assert first != second
