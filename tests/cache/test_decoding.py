"""Decoding through a simulated cache token by token gives what reading whole rows gives."""

import torch
from support import architectures
from support.architectures import families

from rotationzoo.cache.decoding import cache_of_all_positions
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.windows import Cache
from rotationzoo.evaluation.arms import build_baselines
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import Recipe

# Full attention, sliding windows, layers that share a cache, layers without one, and a cache class
# of the family's own.
FAMILIES = "llama", "gemma3", "gemma4", "qwen3_5", "minimax"


@families(FAMILIES)
def test_decoding_reads_what_whole_rows_read(name):
    model = architectures.build(name)
    geometry = geometry_of(model)
    (arm,) = (arm for arm in build_baselines(Recipe(), geometry) if arm.name == "random")
    # Smaller than the sliding windows of these models, so that they read quantized positions.
    cache = Cache(sink=1, recent=2)
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
    # Measured: at most 1.2e-4 (qwen3_5, whose linear attention sums in another order when it
    # decodes), 3e-5 for the others. The codec moves these logits by .2 to 9.
    finite = torch.isfinite(whole)
    torch.testing.assert_close(decoded[finite], whole[finite], rtol=0, atol=5e-4)
    assert (whole[finite] - exact[finite]).abs().max() > 0.1
