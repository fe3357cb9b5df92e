"""What errors of latents cost, compared with float64 references that make every softmax."""

import pytest
import torch
from support import architectures
from support.architectures import LATENTS, families

from rotationzoo.artifact.fit import fit, sum_moments
from rotationzoo.calibration.collect import collect
from rotationzoo.errors import UnsupportedModel
from rotationzoo.linalg import orthogonality
from rotationzoo.linalg.moments import average
from rotationzoo.model import latent
from rotationzoo.model.capture import intercept
from rotationzoo.model.geometry import geometry_of
from rotationzoo.model.latent import expand, read_errors
from rotationzoo.recipe import Recipe

IDS = torch.randint(3, 59, (2, 24), generator=torch.Generator().manual_seed(1))
SINK = 4


def calls_of(model, ids=IDS):
    """Layer -> its attention call, and the output."""
    calls = {}

    def record(call):
        calls[call.layer] = call, call.run()
        return calls[call.layer][1]

    with torch.no_grad(), intercept(model, record):
        model(input_ids=ids, use_cache=False)
    return calls


def softmax_of(attend, query, key):
    """The softmax `[B, H, T, T]` of a call, with the mask that the model made."""
    scores = attend.options["scaling"] * query @ key.mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    if attend.mask is not None:  # the indexer of sparse attention hides more
        mask = attend.mask
        hidden = hidden | (~mask if mask.dtype == torch.bool else mask < -1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def weights_of(module, heads, value_dim):
    """W_K, W_V and W_O, head by head."""
    up = module.kv_b_proj.weight.unflatten(0, (heads, -1))
    key, value = up[:, :-value_dim], up[:, -value_dim:]
    return key, value, module.o_proj.weight.unflatten(1, (heads, -1)).transpose(0, 1)


def costs_of(call, output, fold):
    """The costs `[R, R]` of errors in scores and in values, summed over queries. `fold` makes sums
    over tokens of what it is given, `[T, T', N]` for queries and tokens past the sink, as squares
    `[T, N]`."""
    attend, query, key, value = call.attend, call.query, call.key, call.value
    softmax = softmax_of(attend, query, key)[..., SINK:]
    key_weight, value_weight, out = weights_of(attend.module, query.shape[1], value.shape[-1])
    plain = key_weight.shape[1]
    scores = torch.zeros(key_weight.shape[-1], key_weight.shape[-1], dtype=torch.float64)
    reads = scores.clone()
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            p = softmax[row, head]
            moved = value[row, head, SINK:][None] - output[row, :, head][:, None]
            squares = fold(p[..., None] * (moved @ out[head].T)).sum(-1)
            absorbed = attend.options["scaling"] * query[row, head, :, :plain] @ key_weight[head]
            scores += absorbed.T @ (squares[:, None] * absorbed)
            through = value_weight[head].T @ out[head].T
            reads += fold(p[..., None]).mean(-1).sum() * through @ through.T
    return scores, reads


def exactly(parts):
    return parts.square().sum(1)


@families(LATENTS)
def test_keys_and_values_are_what_is_made_of_the_latent(name):
    model = architectures.build(name)
    for call, _ in calls_of(model).values():
        made = expand(call, call.attend.latent)
        assert torch.equal(made[0], call.key)
        assert torch.equal(made[1], call.value)
        nothing = torch.zeros_like(call.attend.latent)
        assert not expand(call, nothing)[1].any()


@families(LATENTS)
def test_statistics_equal_a_float64_reference(name):
    """With the same random signs, so that nothing is left to chance."""
    model = architectures.build(name, torch.float64)
    geometry = geometry_of(model)
    statistics = average(collect(model, geometry, [IDS[:1], IDS[1:]], Recipe(sink=SINK)))
    for layer, (call, output) in calls_of(model).items():
        attend, query, value = call.attend, call.query, call.value
        columns = latent._signs(IDS.shape[1], value.shape[-1], SINK)[SINK:].double()

        def fold(parts, columns=columns):
            # Values are multiplied by the first column, and the sums of p^2 by the mean of all.
            if parts.shape[-1] > 1:
                return (parts * columns[:, :1]).sum(1).square()
            return (parts * columns).sum(1).square()

        scores, reads = costs_of(call, output, fold)
        count = query.shape[0] * query.shape[1] * query.shape[2]
        close = dict(rtol=1e-9, atol=1e-9 * scores.detach().abs().max().item() / count)
        moments = statistics[layer]
        torch.testing.assert_close(moments["query"].second_moment[0], scores / count, **close)
        torch.testing.assert_close(moments["output"].second_moment[0], reads / count, **close)
        rows = attend.latent[:, 0, SINK:].flatten(0, 1)
        mine = moments["latent"]
        torch.testing.assert_close(mine.second_moment[0], rows.T @ rows / len(rows))
        torch.testing.assert_close(mine.mean[0], rows.mean(0))
        assert mine.count == len(rows)


def test_random_signs_estimate_the_sums_over_tokens(monkeypatch):
    """Their mean over many draws is the sum itself."""
    model = architectures.build("deepseek_v3", torch.float64)
    call, output = calls_of(model)[1]
    exact = costs_of(call, output, exactly)
    total, reads, draws = 0.0, 0.0, 200
    for seed in range(draws):
        monkeypatch.setattr(latent, "_SEED", seed)
        errors = read_errors(call, output, SINK)
        rows = errors.queries @ errors.key_weight
        total, reads = total + rows.mT @ rows, reads + errors.value_metric
    for estimate, sums in zip((total.sum((0, 1)), reads), exact, strict=True):
        assert (estimate / draws - sums).norm() < 0.1 * sums.norm()


def test_the_sum_of_both_costs_predicts_what_small_errors_do():
    """The mean square of the change of a layer's output by errors of its latents. What is left out,
    products of two heads and of both reads, has a mean near 0 with random weights."""
    model = architectures.build("deepseek_v3", torch.float64)
    call, output = calls_of(model)[1]
    attend, metric = call.attend, sum(costs_of(call, output, exactly))
    generator = torch.Generator().manual_seed(0)
    size, draws, changes = 1e-4, 300, []
    for _ in range(draws):
        errors = torch.randn(attend.latent.shape, generator=generator, dtype=torch.float64) * size
        errors[:, :, :SINK] = 0
        moved = expand(call, attend.latent + errors)
        change = (attend(call.query, *moved) - output).flatten(2) @ attend.module.o_proj.weight.T
        changes.append(change.square().sum())
    measured = torch.stack(changes).mean() / size**2
    assert 0.8 < measured / metric.trace() < 1.25


def test_a_cache_of_anything_but_the_latent_is_refused(monkeypatch):
    model = architectures.build("deepseek_v3")
    attention = type(model.model.layers[0].self_attn)
    expand_kv = attention.expand_kv

    def expand_twice_the_latent(self, latents, rope):
        return expand_kv(self, 2 * latents, rope)

    monkeypatch.setattr(attention, "expand_kv", expand_twice_the_latent)
    with pytest.raises(UnsupportedModel, match="compressed latent"):
        geometry_of(model)


@families(LATENTS)
def test_rotations_diagonalize_the_sum_of_both_costs(name):
    model = architectures.build(name, torch.float64)
    geometry, recipe = geometry_of(model), Recipe(sink=SINK, composition="plain")
    statistics = collect(model, geometry, [IDS], recipe)
    rotations = fit(statistics, recipe, geometry)
    for layer, side, rotation in rotations.each():
        assert side == "latent"
        assert rotations[layer].key is rotations[layer].value
        moment = sum_moments(statistics[layer], ("query", "output"))
        diagonal = rotation.matrix.double().mT @ moment @ rotation.matrix.double()
        off = diagonal - torch.diag_embed(diagonal.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-5 * diagonal.abs().max()
        assert orthogonality.is_orthogonal(rotation.matrix, imported=False)
