"""RoPE whose factors change with the tokens of a request: chunks of a prompt, and new tokens, are
read as the model itself reads them all at once."""

import copy
from functools import wraps

import pytest
import torch
import transformers
from support import architectures
from support.caches import with_transforms
from support.models import randomize

from rotationzoo import RotatedCache
from rotationzoo.artifact.fit import fit
from rotationzoo.calibration import sensitivity
from rotationzoo.calibration.collect import collect
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation import probes
from rotationzoo.model.geometry import geometry_of, geometry_on_meta
from rotationzoo.model.loading import on_meta
from rotationzoo.model.prediction import run_decoder
from rotationzoo.recipe import Recipe

BOUNDARY = 32
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8,
    long_factor=[1.0 + 3 * number for number in range(8)], short_mscale=1.0, long_mscale=1.3,
    original_max_position_embeddings=BOUNDARY,
)  # fmt: skip
SIZES = dict(architectures.BASE, num_hidden_layers=2, eos_token_id=None)
PHI = dict(max_position_embeddings=512, original_max_position_embeddings=BOUNDARY)
KINDS = {
    "Phi3": dict(PHI, rope_parameters=LONGROPE, sliding_window=None),
    "Phimoe": dict(PHI, rope_parameters=LONGROPE, num_local_experts=2, sliding_window=None),
    "Llama": dict(
        rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4),
        max_position_embeddings=BOUNDARY,
    ),
}
IDS = torch.randint(3, 64, (1, 80), generator=torch.Generator().manual_seed(0))


def build(kind: str, **options) -> transformers.PreTrainedModel:
    """A new model, because a model may keep the factors of a long text."""
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(SIZES | KINDS[kind] | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    randomize(model, 0.3)
    if kind == "Phimoe":
        model.set_experts_implementation("eager")  # the others have no float64
    return model.double()


def exact_cache(model, **options) -> RotatedCache:
    """A cache that stores everything exact."""
    return RotatedCache(None, model, sink=4, recent=1000, prefill_layout="window", **options)


def write(model, prompt: int, new: int, cache=None, chunk: int | None = None):
    """The tokens that a model writes after a prompt, and the logits of each."""
    given = {} if chunk is None else {"prefill_chunk_size": chunk}
    if cache is not None:
        given |= cache.argument
    ids = IDS[:, :prompt]
    done = model.generate(
        inputs=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **given
    )  # fmt: skip
    return done.sequences, torch.stack(done.logits, dim=1)


@torch.no_grad()
def reads_whole(kind: str, sequences, logits) -> bool:
    """Whether these are the logits of one call of the model, which `generate` casts to float32."""
    new = logits.shape[1]
    expected = build(kind)(input_ids=sequences).logits[:, -new - 1 : -1]
    return torch.allclose(logits.double(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "chunk"), [(50, 16), (50, 64), (50, None), (BOUNDARY - 4, None)], ids=str
)
def test_a_request_that_crosses_the_boundary_is_read_as_one_call(kind, prompt, chunk):
    model = build(kind)
    cache = exact_cache(model)
    sequences, logits = write(model, prompt, 12, cache, chunk)
    assert reads_whole(kind, sequences, logits)
    assert cache.get_seq_length() == prompt + 11
    assert cache.bytes_held
    # The exact model's own cache, as in `generate --compare`.
    again, logits = write(model, prompt, 12, None, chunk)
    assert torch.equal(again, sequences)
    assert reads_whole(kind, sequences, logits)


@pytest.mark.parametrize("kind", ["Phi3", "Phimoe"])
def test_a_request_below_the_boundary_has_the_short_factors(kind):
    model = build(kind)
    write(model, 50, 4, exact_cache(model))
    assert reads_whole(kind, *write(model, 20, BOUNDARY - 20, exact_cache(model), 8))


@torch.no_grad()
def test_a_cache_refuses_the_other_factors():
    model = build("Phi3")
    cache = exact_cache(model)
    model(input_ids=IDS[:, :BOUNDARY], **cache.argument)
    with pytest.raises(RotationZooError, match="has read 32 with those for fewer") as no:
        model(input_ids=IDS[:, BOUNDARY : BOUNDARY + 1], **cache.argument)
    assert "model.generate" in no.value.hint
    cache.reset()
    model(input_ids=IDS[:, : BOUNDARY + 1], **cache.argument)
    model(input_ids=IDS[:, BOUNDARY + 1 :], **copy.deepcopy(cache).argument)
    # A second question that crosses the boundary.
    cache = exact_cache(model)
    write(model, 10, 4, cache)
    with pytest.raises(RotationZooError, match="has read 13 with those for fewer"):
        write(model, 40, 4, cache)


def test_a_cache_that_a_model_drops_raises(monkeypatch):
    kind = transformers.Phi3ForCausalLM
    prepare = kind.prepare_inputs_for_generation

    @wraps(prepare)
    def drop(self, input_ids, **options):
        names = {"cache", "past_key_values", "next_sequence_length"} & options.keys()
        return prepare(self, input_ids, **options | dict.fromkeys(names))

    monkeypatch.setattr(kind, "prepare_inputs_for_generation", drop)
    model = build("Phi3")
    with pytest.raises(RotationZooError, match="the model dropped its cache"):
        write(model, 20, 4, exact_cache(model))


@pytest.mark.parametrize("kind", ["Phi3", "Llama"])
def test_losses_use_the_factors_of_one_call(kind, monkeypatch):
    model, exact = build(kind), []
    note = lambda p, q: exact.append(p) or (p - q).sum(-1)  # noqa: E731
    monkeypatch.setattr(sensitivity.prediction, "divergence_of", note)
    geometry = geometry_of(model)
    text = sensitivity.Text(IDS[0, :50], [*range(BOUNDARY - 4, 50)], slice(4, 20))
    recipe = Recipe(sink=4)
    rotations = with_transforms(fit(collect(model, geometry, [IDS], recipe), recipe, geometry))
    sensitivity.measure_losses(model, geometry, rotations, [text], lambda *_: None)
    with torch.no_grad():
        expected = build(kind)(input_ids=IDS[:, :50]).logits[0, BOUNDARY - 4 :]
    assert torch.allclose(exact[0], expected)


def test_recorded_answers_use_one_kind_of_factors():
    model = build("Phi3")
    settings = exact_cache(model).settings
    probe = probes._record(model, IDS[0, : BOUNDARY - 6], settings)
    assert torch.allclose(torch.tensor(probe.log_probabilities), torch.tensor(probe.exact))


@torch.no_grad()
def test_a_long_row_does_not_change_later_ones():
    """dynamic NTK keeps the factors of the longest row so far."""
    model = build("Llama")
    run_decoder(model, IDS)
    states = run_decoder(model, IDS[:, :40]).output.last_hidden_state
    assert torch.equal(states, build("Llama").model(IDS[:, :40]).last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_alone_shows_what_is_cached(kind):
    model = build(kind)
    assert geometry_on_meta(on_meta(model.config, kind)) == geometry_of(model)
