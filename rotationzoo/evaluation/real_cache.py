"""A model that reads its tokens through a real 2-bit cache, as a server would, in place of a
simulation; drift: what it reads through that cache of a text that the exact model generates; and
the record of its answers, with which `checks.server` compares a running server."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rotationzoo.artifact.measured import Probe
from rotationzoo.artifact.scores import ArmDrift, Drift, StepMeasures
from rotationzoo.artifact.store import Artifact
from rotationzoo.cache.rotated import RotatedCache
from rotationzoo.codec.layout import CacheLayout
from rotationzoo.codec.rotated import RotatedCodec
from rotationzoo.codec.settings import CacheSettings
from rotationzoo.errors import RotationZooError
from rotationzoo.evaluation.forward import Trial
from rotationzoo.geometry import full_attention_layers, shares_blocks
from rotationzoo.linalg.paired import weighted_mean
from rotationzoo.model.cache_names import cache_argument
from rotationzoo.model.compatibility import other_weights_note
from rotationzoo.model.loading import forward_errors, input_device
from rotationzoo.model.prediction import continue_greedily, divergence_of
from rotationzoo.model.source import Source
from rotationzoo.progress import Progress
from rotationzoo.recipe import Data
from rotationzoo.recipe.rope import position_count
from rotationzoo.text.documents import HELD_OUT
from rotationzoo.text.rows import read_corpus
from rotationzoo.vllm.settings import Options, make_settings


class ThroughCache:
    """Called like the model itself, with token ids alone; queries read what they do in a
    `Simulation` of the same layout. Ids are read in chunks of `prefill_chunk`; without one, and for
    the last `decoded` tokens, one by one as soon as anything is quantized."""

    def __init__(self, model: PreTrainedModel, codec: RotatedCodec, layout: CacheLayout):
        self.model, self.layout = model, layout
        self.settings = CacheSettings(codec, layout)
        self.device = model.device

    @torch.no_grad()
    def __call__(
        self, input_ids: torch.Tensor, logits_to_keep: int, decoded: int = 0, **ignored: Any
    ) -> SimpleNamespace:
        """The last `logits_to_keep` logits of ids `[B, T]`."""
        cache, logits = RotatedCache(self.settings, self.model), []
        left = input_ids.shape[1]
        for piece in input_ids.split([*self._pieces(left - decoded), *[1] * decoded], dim=1):
            length = piece.shape[1]
            if self.layout.prefill_chunk and length == 1 and not decoded:
                # A chunk of one token would count as a decoding step. The second one is not read.
                piece = piece.repeat(1, 2)
            left -= length
            wanted = piece.shape[1] if left < logits_to_keep else 1
            given = cache_argument(self.model, cache)
            output = self.model(input_ids=piece, use_cache=True, logits_to_keep=wanted, **given)
            if left < logits_to_keep:
                logits.append(output.logits[:, :length][:, -(logits_to_keep - left) :])
        return SimpleNamespace(logits=torch.cat(logits, dim=1))

    def _pieces(self, length: int) -> list[int]:
        size = self.layout.prefill_chunk
        if size is None:
            # Before this position, every query reads everything exact.
            exact = min(self.layout.first_quantized, length)
            return [part for part in (exact, *[1] * (length - exact)) if part]
        return [min(size, length - start) for start in range(0, length, size)]


@torch.no_grad()
def measure_drift(
    model: PreTrainedModel,
    batches: list[torch.Tensor],
    trial: Trial,
    tokens: int,
    progress: Progress,
) -> Drift:
    """Let the exact model continue every row of the batches `[B, T]` greedily, past any end, and
    the artifacts' arms and no rotation read the same tokens, one by one, with the first windows.
    A row is cut where the model would have no position for the last token."""
    room = (position_count(model.config) or 2**31) - tokens
    prompts = [ids[:, :room] for ids in batches if ids.shape[1] > trial.start]
    codecs = {}
    for arm in trial.arms:
        is_read = arm.about.kind == "artifact" or arm.name == "identity"
        if is_read and isinstance(arm.codec, RotatedCodec):
            codecs[arm.name] = arm.codec
    steps: dict[str, list[torch.Tensor]] = {name: [] for name in codecs}
    cache, runs, done = trial.caches[0], len(prompts) * len(codecs), 0
    for prompt in prompts:
        progress("generating", done, runs)
        text = prompt.to(input_device(model))
        layout = replace(cache, prefill_chunk=cache.prefill_chunk or text.shape[1])
        written, exact = continue_greedily(model, text, None, tokens)
        text = torch.cat([text, written[:, :-1]], dim=1)
        for name, codec in codecs.items():
            logits = ThroughCache(model, codec, layout)(text, tokens, decoded=tokens - 1).logits
            same = (exact.argmax(-1) == logits.argmax(-1)).float()
            kl = divergence_of(exact, logits)
            steps[name].append(torch.stack([same, kl], dim=-1).double().cpu())
            done += 1
            progress("generating", done, runs)
    lengths = [len(row) for ids in prompts for row in ids]
    drifts = {name: _summarize(torch.cat(compared)) for name, compared in steps.items()}
    return Drift(tokens=tokens, prompt_tokens=lengths, arms=drifts)


def _summarize(steps: torch.Tensor) -> ArmDrift:
    """The figures of all steps, `[P, N, 2]`: whether the token is the same, and the KL."""
    weights, by_step, start = steps.new_ones(len(steps)), [], 0
    for part in steps.chunk(4, dim=1):
        (share, error), (kl, kl_error) = (weighted_mean(each, weights) for each in part.mean(1).T)
        errors, stop = {"agreement": error, "kl": kl_error}, start + part.shape[1]
        step = StepMeasures(from_=start, to=stop, agreement=share, kl=kl, standard_error=errors)
        by_step.append(step)
        start = stop
    # The arm's own greedy text goes on as the exact model's until it has another token.
    same = steps[:, :, 0].cumprod(1).sum(1).int()
    return ArmDrift(by_step=by_step, same_tokens=same.tolist())


PROMPTS, PROMPT, ANSWER = 4, 1024, 16
"""How many prompts are recorded, and the tokens of each and of its answer."""
CANDIDATES = 5
"""As many as every server with OpenAI's API gives log probabilities of."""


def record_probes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, artifact: Artifact, source: Source
) -> list[Probe]:
    """Let a model continue bundled text through the cache that `serve` makes of an artifact.

    Raises `RotationZooError` where no server can read the artifact with these weights, for layers
    with a sliding window, which a server keeps exact, and for too few positions.
    """
    if note := other_weights_note(artifact, source):
        raise RotationZooError(note)
    options = Options(artifact=str(artifact.folder))
    has_others = shares_blocks(model.config)
    settings = make_settings(options, source.name, source.folder, has_others)
    if full_attention_layers(model.config) is not None:
        raise RotationZooError("a server keeps layers with a sliding window exact")
    positions = position_count(model.config) or PROMPT + ANSWER
    length = min(PROMPT, positions - ANSWER)
    if length <= settings.layout.sink + settings.layout.recent:
        raise RotationZooError(f"no token of a prompt of {length} would be read from codes")
    data = Data(source=str(HELD_OUT), tokens=PROMPTS * length, length=length)
    prompts = read_corpus(data, tokenizer).rows
    with forward_errors(source.name, 1, length):
        return [_record(model, prompt, settings) for prompt in prompts]


@torch.no_grad()
def _record(model: PreTrainedModel, prompt: torch.Tensor, settings: CacheSettings) -> Probe:
    """The answer to a prompt `[T]`."""
    # The prompt is one chunk, as in a server: it reads itself exact, and the tokens after it codes.
    cache, row = RotatedCache(settings, model), prompt[None].to(input_device(model))
    tokens, logits = continue_greedily(model, row, cache, ANSWER)
    ids = torch.cat([row, tokens[:, :-1]], dim=1)
    exact = model(input_ids=ids, use_cache=False, logits_to_keep=ANSWER).logits[0].float().cpu()
    read, candidates = logits[0].float().cpu().log_softmax(-1).topk(CANDIDATES)
    return Probe(
        prompt=prompt.tolist(),
        tokens=tokens[0].tolist(),
        candidates=candidates.tolist(),
        log_probabilities=read.tolist(),
        exact=exact.log_softmax(-1).gather(1, candidates).tolist(),
    )
