"""The moment of queries weighted by how peaked their attention is, against the weights that models
return themselves."""

import pytest
import torch
from support import architectures
from support.lookups import lookup_model, lookup_prompts

from rotationzoo.cache.arm import Arm
from rotationzoo.cache.observers import Observers
from rotationzoo.cache.simulated import Simulation
from rotationzoo.cache.windows import Cache
from rotationzoo.calibration import peaked_queries
from rotationzoo.calibration.collect import collect
from rotationzoo.calibration.fit import fit
from rotationzoo.calibration.key_feedback import add_factors
from rotationzoo.calibration.peaked_queries import sampled_positions
from rotationzoo.errors import UnsupportedModel
from rotationzoo.model import capture as model_capture
from rotationzoo.model.capture import capture, decoder
from rotationzoo.model.geometry import geometry_of
from rotationzoo.recipe import PRESETS, Recipe

BATCHES = list(torch.randint(3, 59, (2, 3, 32), generator=torch.Generator().manual_seed(2)))
RECIPE = Recipe(sink=4, recent=6, feedback=True)
CLOSE = 1e-5  # of the largest entry; measured 1e-6, since weights are float32


def moments_of(model, batches=BATCHES, recipe=RECIPE):
    """Layer -> the moment of peaked queries."""
    statistics = collect(model, geometry_of(model), batches, recipe)
    return {layer: kinds["peaked_query"] for layer, kinds in statistics.items()}


def naive_sums(name, positions):
    """Owner -> the weighted sums `[KV heads, D, D]` and the total weights `[KV heads]`, query by
    query, from the attention weights that eager attention returns."""
    model = architectures.build(name, attn_implementation="eager")
    owners = {layer.index: layer for layer in geometry_of(model)}
    queries, sums = {}, {}
    for ids in BATCHES:
        with torch.no_grad():
            with capture(model, lambda layer, query, *_: queries.update({layer: query.clone()})):
                decoder(model)(input_ids=ids, use_cache=False)
            attentions = model(ids, use_cache=False, output_attentions=True).attentions
        given = [attention for attention in attentions if attention is not None]
        for layer, softmax in zip(queries, given, strict=True):
            heads = owners[layer].kv_heads
            dim = queries[layer].shape[-1]
            zeros = torch.zeros(heads, dim, dim).double(), torch.zeros(heads).double()
            total, weights = sums.setdefault(owners[layer].owner, zeros)
            for row, head, position in torch.cartesian_prod(
                torch.arange(3), torch.arange(softmax.shape[1]), positions
            ).tolist():
                # The keys that are quantized for this query.
                read = softmax[row, head, position, 4 : max(4, position - 5)].double()
                weight = read.square().sum() ** 2 + peaked_queries.EVERY_QUERY
                query = queries[layer][row, head, position].double()
                kv_head = head * heads // softmax.shape[1]
                total[kv_head] += weight * query.outer(query)
                weights[kv_head] += weight
    return sums


@pytest.mark.parametrize(
    "name", ["qwen3", "mistral", "gemma2", "gemma4", "gpt_oss", "llama4", "qwen3_5"]
)
def test_moments_are_those_of_the_weights_that_models_return(name, monkeypatch):
    """GQA, a window, a soft cap, a shared cache, sinks, chunks, and a hybrid, with every 4th
    query, in blocks of one or two."""
    if not architectures.available(name):
        pytest.skip("not in this version of transformers")
    monkeypatch.setattr(peaked_queries, "SAMPLED_QUERIES", 8)
    monkeypatch.setattr(peaked_queries, "_SCORES_BYTES", 4 * 12 * 32 * 2)
    expected = naive_sums(name, torch.arange(3, 32, 4))
    moments = moments_of(architectures.build(name))
    assert moments.keys() == expected.keys()
    for layer, (total, weights) in expected.items():
        assert (moments[layer].second - total).abs().max() < CLOSE * total.abs().max()
        assert torch.allclose(moments[layer].weight, weights, rtol=CLOSE)


def test_short_rows_are_weighted_whole():
    total, weights = naive_sums("qwen3", torch.arange(32))[1]
    moment = moments_of(architectures.build("qwen3"))[1]
    assert (moment.second - total).abs().max() < CLOSE * total.abs().max()
    assert torch.allclose(moment.weight, weights, rtol=CLOSE)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 2048, 3000, 131072])
def test_sampled_positions_are_evenly_spaced_and_few(length):
    positions = sampled_positions(length)
    steps = positions.diff().unique()
    assert len(steps) <= 1
    assert 128 <= len(positions) <= 256 or len(positions) == length
    step = steps.item() if len(steps) else 1
    assert positions[0] == step - 1
    assert length - step <= positions[-1] < length


def test_scores_of_long_rows_are_bounded():
    """A model of 64 query heads on a row of 131,072 tokens scores 7 queries at a time."""
    queries = peaked_queries.block_size(64, 131072)
    assert queries == 7
    assert 4 * 64 * queries * 131072 < 256e6
    assert peaked_queries.block_size(512, 10**6) == 1


def test_sums_do_not_depend_on_the_batch():
    model = architectures.build("mistral")
    rows = [row[None] for batch in BATCHES for row in batch]
    one_by_one, whole = moments_of(model, rows), moments_of(model)
    for layer, moment in whole.items():
        # Measured 0; a library may order its float32 sums by the size of the batch.
        assert torch.allclose(one_by_one[layer].second, moment.second, rtol=1e-4, atol=1e-5)


def test_a_second_pass_does_not_count_queries_again():
    model = architectures.build("qwen3")
    both = PRESETS["oscar-v1"].model_copy(update={"sink": 4, "recent": 6, "feedback": True})
    for layer, moment in moments_of(model, recipe=both).items():
        assert torch.equal(moment.weight, moments_of(model)[layer].weight)


def test_where_no_key_is_quantized_all_queries_count_alike():
    """Rows of 32 tokens with 256 recent ones."""
    model = architectures.build("qwen3")
    statistics = collect(model, geometry_of(model), BATCHES, Recipe(sink=4, feedback=True))
    for kinds in statistics.values():
        peaked, alike = kinds["peaked_query"].second_moment, kinds["query"].second_moment
        assert torch.allclose(peaked, alike, rtol=1e-5, atol=1e-6)


def test_a_recipe_without_feedback_does_not_weight_queries():
    model = architectures.build("qwen3")
    statistics = collect(model, geometry_of(model), BATCHES, Recipe(sink=4))
    assert not any("peaked_query" in kinds for kinds in statistics.values())


def test_a_model_that_does_not_show_its_softmax_is_refused(monkeypatch):
    def refuse(module):
        raise AttributeError

    model = architectures.build("qwen3")
    monkeypatch.setattr(model_capture, "eager_attention", refuse)
    collect(model, geometry_of(model), BATCHES, Recipe(sink=4))
    with pytest.raises(UnsupportedModel, match=r"no eager attention .* error feedback") as refused:
        collect(model, geometry_of(model), BATCHES, RECIPE)
    assert refused.value.hint == "add: --no-feedback"


def test_queries_that_look_something_up_read_it_more_exactly():
    """Attention KL of the lookups at the end of prompts that the statistics have not seen, beside
    that with the metric of all queries alike."""
    model, cache = lookup_model(), Cache(sink=2, recent=4)
    geometry = geometry_of(model)
    recipe = Recipe(sink=2, recent=4, center_keys=True, feedback=True)
    rows = torch.stack([prompt.ids for prompt in lookup_prompts(16, 96, seed=1)])
    statistics = collect(model, geometry, [rows], recipe)
    alike = {layer: {"peaked_query": kinds["query"]} for layer, kinds in statistics.items()}
    rotations = fit(statistics, recipe, geometry)
    unseen = torch.stack([prompt.ids for prompt in lookup_prompts(32, 96, seed=2)])
    lookups = torch.tensor([88, 90, 92, 94])
    divergences = {}

    for name, moments in (("alike", alike), ("peaked", statistics)):
        arm = Arm(name, add_factors(rotations, moments, recipe), rounding="feedback")
        simulation = Simulation(arm, cache, geometry, {0}, ("key",), lookups)

        def observe(layer, divergence, positions, name=name):
            divergences[name] = divergence.mean().item()

        with torch.no_grad(), simulation.running(model, observers=Observers(kl=observe)):
            model(unseen, use_cache=False)
    # Measured 4.1e-5 beside 1.8e-4.
    assert divergences["peaked"] < 0.5 * divergences["alike"]
